from rlfuse.api.commands import evaluate as evaluate
from rlfuse.api.commands import generate as generate
from rlfuse.api.commands import plan as plan
from rlfuse.api.commands import start as start
from rlfuse.api.commands import train as train
from rlfuse.api.jobs import Job as Job
from rlfuse.api.jobs import JobError as JobError
from rlfuse.api.results import Evaluation as Evaluation
from rlfuse.api.results import Plan as Plan
from rlfuse.api.results import Run as Run
from rlfuse.config.schema import Config as Config
from rlfuse.errors import ConfigError as ConfigError
from rlfuse.errors import DataError as DataError
from rlfuse.errors import EngineError as EngineError
from rlfuse.errors import RewardError as RewardError
from rlfuse.errors import RlfuseError as RlfuseError

__version__: str

def version_of(package: str) -> str | None: ...
