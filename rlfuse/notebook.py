"""rlfuse in a notebook: read a run, write a reward and compare it, start a job and follow it.

    from rlfuse import notebook as nb

    table = nb.samples("runs/rlfuse/my_run")            # what the run kept, a pandas table
    mine = nb.score(table, my_reward)                   # any reward, in this process
    nb.compare(table, mine).disagreements()             # where the two disagree, with the texts
    run = nb.train("my_job.yaml", "reward.functions=[my_reward.py:my_reward]")

Role: names for people at a keyboard; `notebooks/` shows them at work. Scoring here has no time limit and no process of
its own; jobs, and `rlfuse reward replay`, have both.
"""

from rlfuse.tools.dataframes import metrics, samples, surprise, time_spent
from rlfuse.tools.evaluation.comparison import Comparison, compare
from rlfuse.tools.notebook.jobs import Job, JobError, start, train
from rlfuse.tools.notebook.judging import plot_confidence, plot_orders, verdicts_by_order
from rlfuse.tools.notebook.plots import plot_comparison, plot_metrics, plot_rewards, plot_step, plot_time
from rlfuse.tools.notebook.preferences import pairs, plot_calibration, plot_length_bias, score_pairs
from rlfuse.tools.notebook.scoring import measure, score
