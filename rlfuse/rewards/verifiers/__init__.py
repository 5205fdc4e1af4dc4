r"""Verifiers that come with rlfuse: reward functions in verl's shape for answers that can be checked (jobs/rewards.md).

    reward.functions: ["rlfuse.rewards.verifiers.choice:score"]

Each `score` returns `score` in [0, 1], `acc` (0 or 1), `format` (1 if an answer of that kind was found) and, if the
answer is not right, mostly a `reason`. Verifiers receive the response without its thought: decorate a function that
calls one with `rlfuse.rewards.reasoning_tags.answer_only`. Options are keyword parameters from the entry's `kwargs`. A ground
truth that cannot be read is a ValueError that names it, never a score of 0. Full-width characters are read as ASCII and
U+2212 as a minus sign, except in code; letters of other scripts are no choices: a Cyrillic А is no A.
"""
