"""A second reward of gdpo.yaml; the job names it as a module next to its file."""


def brevity(data_source, solution_str, ground_truth, extra_info=None):
    """Return a reward from 0 to 1 that is higher for shorter responses."""
    return 1 / (1 + len(solution_str) / 100)
