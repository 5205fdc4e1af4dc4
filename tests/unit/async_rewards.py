"""Async reward functions with every signature and kind of callable; for the response `hang` they take 10 minutes."""

import asyncio
import functools

SIGNATURES = ("verl", "verl_batch", "trl", "openrlhf", "by_samples")
CALLABLES = ("Class", "instance", "method", "static", "Scorer", "scorer", "partial", "nested_partial",
             "partial_of_instance", "awaits_inside", "returns_awaitable", "alias")  # fmt: skip
NAMES = (*SIGNATURES, *CALLABLES)


async def length(text):
    await asyncio.sleep(600 if text == "hang" else 0.001)
    return float(len(text))


async def lengths(texts):
    return await asyncio.gather(*map(length, texts))


async def verl(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": await length(solution_str)}


async def verl_batch(data_sources, solution_strs, ground_truths, extra_infos):
    return await lengths(solution_strs)


async def trl(prompts, completions, **columns):
    return await lengths(each if isinstance(each, str) else each[0]["content"] for each in completions)


async def openrlhf(queries, prompts, labels, **kwargs):
    pairs = zip(queries, prompts, strict=True)
    return {"rewards": await lengths(query.removeprefix(prompt) for query, prompt in pairs)}


async def by_samples(samples):
    return await lengths(sample.response for sample in samples)


class Class:
    async def __call__(self, solution_str, ground_truth=None):
        return await length(solution_str)

    async def grade(self, solution_str):
        return await length(solution_str)

    @staticmethod
    async def static(solution_str):
        return await length(solution_str)


class Scorer:
    async def score(self, samples):
        return await lengths(sample.response for sample in samples)


async def scaled(solution_str, factor, offset):
    return factor * await length(solution_str) + offset


def retried(function):
    @functools.wraps(function)
    async def wrapper(*args, **kwargs):
        return await function(*args, **kwargs)

    return wrapper


def logged(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


@retried
async def awaits_inside(solution_str):
    return await length(solution_str)


@logged
async def returns_awaitable(solution_str):
    return await length(solution_str)


instance = Class()
method = instance.grade
static = Class.static
scorer = Scorer()
partial = functools.partial(scaled, factor=1.0, offset=0.0)
nested_partial = functools.partial(functools.partial(scaled, factor=1.0), offset=0.0)
partial_of_instance = functools.partial(instance, ground_truth="")
alias = verl

_calls = 0


async def first_call_hangs(solution_str):
    global _calls
    _calls += 1
    return await length("hang" if _calls == 1 else solution_str)
