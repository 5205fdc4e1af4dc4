"""Verifiers that come with rlfuse: reward functions in verl's shape for answers that can be checked.

    reward.functions: ["rlfuse.rewards.verifiers.choice:score"]

| module        | answer                                   | ground truth                                             |
|---------------|------------------------------------------|----------------------------------------------------------|
| `exact`       | a text                                   | the text, or a list of texts                             |
| `numeric`     | the final number                         | a number                                                 |
| `choice`      | a letter or an option's text             | a letter or an option's text                             |
| `math`        | an expression in LaTeX or plain text     | an expression in LaTeX or plain text                     |
| `json_schema` | JSON                                     | a JSON schema                                            |
| `pattern`     | a text                                   | a regular expression                                     |
| `code`        | Python                                   | tests, in the forms of `code_tests`                      |
| `interval`    | a stretch of time, `3.2 to 5.0`          | the same                                                 |
| `box`         | a box in a picture, `[x1, y1, x2, y2]`   | the same                                                 |

jobs/rewards.md lists the forms of answers that each accepts; `answers` takes them out of their wrapping.

Each `score` returns `score` in [0, 1], `acc` (right or wrong: 0 or 1), `format` (1 if an answer of that kind was found)
and, if the answer is not right, mostly a `reason`. Verifiers receive the response without its thought: a thought
without an end, also one that the chat template began, holds no answer. (If a custom function calls a verifier, decorate
it with `rlfuse.rewards.thoughts.answer_only`, or set `answer_only: true` in its entry: the response alone does not show
that the template began a thought.) Options are keyword parameters, set by the entry's `kwargs`; `options` of `choice`
and `size` of `box` are also read from a row's `extra_info`. A ground truth that cannot be read is a ValueError that
names it, never a score of 0. Full-width characters are read as ASCII and U+2212 as a minus sign, except in code;
letters of other scripts are not: a Cyrillic А or В is no choice A or B.
"""
