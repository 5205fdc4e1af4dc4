# Sourced by the jobs beside it: the checkout, its environment (installed where it is missing), quiet libraries.
set -euo pipefail
unset PYTHONDONTWRITEBYTECODE # a run starts a dozen processes: cached bytecode halves that
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash jobs/install.sh
export PATH="$PWD/.venv/bin:$PATH" TORCH_EXTENSIONS_DIR="${TORCH_EXTENSIONS_DIR:-$PWD/.venv/torch_extensions}"
export RAY_USAGE_STATS_ENABLED=0 VLLM_NO_USAGE_STATS=1
