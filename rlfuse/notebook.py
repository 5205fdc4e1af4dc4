"""rlfuse in a notebook: read a run, write a reward and compare it, start a job and follow it.

    from rlfuse import notebook as nb

    table = nb.samples("runs/rlfuse/my_run")            # samples of the run, a pandas table
    scored = nb.score(table, my_reward)                 # any reward function, in this process
    nb.compare(table, scored).disagreements()           # samples on which the rewards disagree, with texts
    run = nb.train("my_job.yaml", reward=my_reward)     # `rlfuse.train`

Interactive API; see `notebooks/` for examples. Scoring runs in this process without a time limit; jobs and
`rlfuse reward replay` use separate processes with one.
"""

from rlfuse.api.commands import evaluate, generate, plan, start, train
from rlfuse.api.jobs import Job, JobError
from rlfuse.api.results import Run
from rlfuse.tools.dataframes import metrics, samples, surprise, time_spent
from rlfuse.tools.evaluation.comparison import Comparison, compare
from rlfuse.tools.notebook.judging import plot_confidence, plot_orders, verdicts_by_order
from rlfuse.tools.notebook.plots import plot_comparison, plot_metrics, plot_rewards, plot_step, plot_time
from rlfuse.tools.notebook.preferences import pairs, plot_calibration, plot_length_bias, score_pairs
from rlfuse.tools.notebook.scoring import measure, score
