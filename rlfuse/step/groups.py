"""Create the groups of samples to generate: for training, for validation and for the consistency check of engines.

Role: the controller's source of work. Seeds of training samples depend only on prompt and step, with
rollout.draft=history only on the prompt, as those of validation. Clips of prompts are encoded here; groups with an
unreadable clip are left out.
Waits: for encoders, bounded by their own limits.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace

from rlfuse.config.custom_functions import traits_of
from rlfuse.config.rollout import HISTORY
from rlfuse.config.schema import Config
from rlfuse.events import Recorder
from rlfuse.fusion.selection import Draw, Selection, Source
from rlfuse.protocols import Engines
from rlfuse.samples import TRAINING, VALIDATION, Group, Prompt, make_groups
from rlfuse.step.agreement import MAX_TRIED_PROMPTS, SAMPLES_PER_ENGINE, comparison_priority
from rlfuse.step.drafts import Drafts


@dataclass(kw_only=True)
class GroupSource:
    """Source of groups. `say` prints a line for the user."""

    config: Config
    engines: Engines
    prompts: Source
    selection: Selection
    recorder: Recorder
    held_out: Sequence[Prompt] = ()
    drafts: Drafts = field(default_factory=Drafts)
    say: Callable[[str], None] = print

    async def draw(self, step: int) -> Draw:
        """Return the groups of a training step, without those whose clips cannot be encoded."""
        with self.recorder.span("data", step=step):
            draw = self.selection.draw(lambda prompts: self.training_groups(prompts, step))
            groups = await self._encoded(draw.groups, step, "training")
        kept = {id(group) for group in groups}
        eligible = sum(id(group) in kept for group in draw.groups[: draw.eligible])
        return replace(draw, groups=groups, eligible=eligible, needed=min(draw.needed, eligible))

    async def validation_groups(self, step: int) -> list[Group]:
        """Return the groups of the held-out prompts."""
        samples, seed = self.config.rollout.val_kwargs.n, self.config.data.seed
        groups = make_groups(self.held_out, samples, seed, step, scope=VALIDATION)
        self.drafts.attach(groups)
        return await self._encoded(groups, step, "testing")

    async def comparison_group(self, step: int) -> Group | None:
        """Return a group of the most informative prompt with a readable clip; None after MAX_TRIED_PROMPTS."""
        count = SAMPLES_PER_ENGINE * len(self.engines.rollout)
        for prompt in sorted(self.prompts.prompts, key=comparison_priority)[:MAX_TRIED_PROMPTS]:
            groups = make_groups([prompt], count, self.config.data.seed, step)
            if groups := await self.engines.clips.encode(groups, "testing", check_failures=False):
                return groups[0]
        self.say(f"Skipping the engine/trainer consistency check: none of {MAX_TRIED_PROMPTS} clips can be read.")
        return None

    def more_groups(self, step: int, drawn: Container[str]) -> list[Group]:
        """Return groups of new prompts for dynamic sampling; none after a pass over the data.

        `drawn`: ids of the samples that the step already has.
        """
        for _ in range(len(self.prompts.prompts) // self.config.data.train_batch_size + 1):
            groups = self.training_groups(self.prompts.next_batch(), step)
            if new := [group for group in groups if group.samples[0].id not in drawn]:
                return new
        return []

    def training_groups(self, prompts: Sequence[Prompt], step: int) -> list[Group]:
        """Return groups of unfinished, seeded samples of these prompts."""
        with_baseline = traits_of(self.config.algorithm.adv_estimator).needs_baseline
        scope = TRAINING if self.config.rollout.draft == HISTORY else None
        groups = make_groups(prompts, self.config.rollout.n, self.config.data.seed, step, with_baseline, scope)
        self.drafts.attach(groups)
        return groups

    async def _encoded(self, groups: list[Group], step: int, holder: str) -> list[Group]:
        if not any(group.prompt.visual for group in groups):
            return groups
        with self.recorder.span("encode_clips", step=step, cause=holder):
            return await self.engines.clips.encode(groups, holder)
