"""Verifiers that come with rlfuse: reward functions in verl's shape for answers that can be checked.

    reward.functions: ["rlfuse.rewards.verifiers.choice:score"]

| module        | answer                                   | ground truth                                             |
|---------------|------------------------------------------|----------------------------------------------------------|
| `exact`       | a text                                   | the text, or a list of texts                             |
| `numeric`     | the final number                         | a number                                                 |
| `choice`      | a letter or an option's text             | a letter or an option's text                             |
| `math`        | an expression in LaTeX                   | an expression in LaTeX                                   |
| `json_schema` | JSON                                     | a JSON schema                                            |
| `pattern`     | a text                                   | a regular expression                                     |
| `code`        | Python                                   | tests, in the forms of `code_tests`                      |
| `interval`    | a stretch of time, `3.2 to 5.0`          | the same                                                 |
| `box`         | a box in a picture, `[x1, y1, x2, y2]`   | the same                                                 |

Each `score` gives `score` in [0, 1], `acc` (right or wrong: 0 or 1), `format` (1 where an answer of that kind was
found) and, where something is to be said, `reason` as text. They are shown what follows the thought: a thought without
an end, also one that the chat template began, holds no answer. (Where a function of your own calls one, decorate yours
with `rlfuse.rewards.thoughts.answer_only`, or set `answer_only: true` in its entry: the response alone does not say
that the template began a thought.) Options are keyword parameters, set by the entry's `kwargs`; `options` of `choice`
and `size` of `box` are also taken from a row's `extra_info`. A ground truth that can't be read is a ValueError that
names it, never a score of 0. Look-alikes: full-width characters count as the ASCII ones they stand for and U+2212 as a
minus sign, but in code; letters of other scripts are what they are, a Cyrillic А or В is no choice A or B.
"""
