r"""Built-in verifiers: rule-based reward functions with verl's signature for verifiable answers (jobs/rewards.md).

    reward.functions: ["rlfuse.rewards.verifiers.choice:score"]

Each `score` returns `score` in [0, 1], `acc` (0 or 1), `format` (1 if an answer of the expected kind was found) and,
for most wrong answers, a `reason`. Verifiers receive the response without its reasoning: decorate a function that
calls a verifier with `rlfuse.rewards.reasoning_tags.answer_only`. Options are keyword parameters, set in the `kwargs`
of the entry. A ground truth that cannot be parsed raises ValueError; it is never a score of 0. Full-width characters
are read as ASCII and U+2212 as a minus sign, except in code. Letters of other scripts are not choices: a Cyrillic А is
not an A.
"""
