#!/usr/bin/env bash
# Every picture of the documents, from undisturbed runs of this version on this machine, and the tables beside them.
#
#   bash jobs/pictures.sh                      all of them (about 40 minutes on two cores)
#   bash jobs/pictures.sh quickstart report    some (minutes on two cores):
#
#   quickstart 3  report 1 (of quickstart's run)  live 3  timeline 3  schedules 5  long_video_steps 6
#   contact_sheet 3  proxy_and_truth 7  gpu_slot 1 (these three don't depend on how busy the machine is)
#
# What is measured is taken on a quiet machine only: the CPU time of other processes is measured before and meanwhile
# (tests/benchmarks/quiet.py). Where they take more than 5 % nothing is drawn; where they do so meanwhile, the picture
# stays in outputs/pictures, marked in its .quiet file, and that of the documents stays as it is. RLFUSE_BUSY=1 starts on
# a busy machine all the same. `report` needs node and npm, which fetches a Chromium (CHROMIUM names another one).
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
[ $# -gt 0 ] || set -- quickstart report live timeline schedules long_video_steps contact_sheet proxy_and_truth gpu_slot

out=outputs/pictures
mkdir -p "$out"
runs="trainer.default_local_dir=$out/runs trainer.project_name=pictures trainer.wandb_mode=disabled"
steps=${STEPS:-16} # of training runs; fewer only to try the script

# measured NAME COMMAND...: status 0 if nobody disturbed it
measured() {
    local name=$1
    shift
    echo "[pictures] $name: $*"
    python tests/benchmarks/quiet.py --note "$out/$name.quiet" "$@"
}

# train NAME WORD...: a new run
train() {
    local name=$1
    shift
    rm -rf "$out/runs/pictures/$name"
    rlfuse train "$@" $runs "trainer.experiment_name=$name" "trainer.total_training_steps=$steps"
}

keep() {
    cp "$1" "$2"
    echo "[pictures] made $2"
}

quickstart() {
    rlfuse prepare quickstart
    local seed
    for seed in 1 2 3; do
        rm -rf "$out/runs/pictures/quickstart-$seed"
        measured "quickstart-$seed" rlfuse train experiment=quickstart "data.seed=$seed" trainer.test_freq=4 $runs \
            "trainer.experiment_name=quickstart-$seed" "trainer.total_training_steps=$steps"
    done
    python tests/benchmarks/pictures.py row "$out"/runs/pictures/quickstart-[123]
    python tests/benchmarks/pictures.py lines "$out/runs/pictures/quickstart-1" # for the README
    keep "$out/runs/pictures/quickstart-1/reward_curve.png" jobs/quickstart.png
}

report() {
    [ -d "$out/runs/pictures/quickstart-1" ] || quickstart
    [ "$(cut -d, -f1 "$out/quickstart-1.quiet")" = quiet ] || return 3
    rlfuse report "$out/runs/pictures/quickstart-1" --out "$out/report.html"
    sed -i "s#$PWD/##g" "$out/report.html" # no path of this machine in a picture
    [ -d "$out/browser/node_modules" ] || npm install --prefix "$out/browser" puppeteer-core @sparticuz/chromium
    cp tests/benchmarks/photograph.mjs "$out/browser"
    node "$out/browser/photograph.mjs" "$out/report.html" "$out/report.png"
    keep "$out/report.png" jobs/report.png
}

live() {
    rlfuse prepare quickstart
    measured live python tests/benchmarks/live_view.py --out "$out/live.svg" $runs trainer.experiment_name=live
    keep "$out/live.svg" jobs/live.svg
}

timeline() {
    measured timeline python tests/benchmarks/real_policies.py --repeats "${REPEATS:-9}" --out "$out/timeline"
    cat "$out/timeline/table.md"
    keep "$out/timeline/timeline.png" jobs/timeline.png
}

schedules() {
    measured schedules python tests/benchmarks/pipeline_executor.py --repeats "${REPEATS:-5}" --out "$out/schedules"
    cat "$out/schedules/table.md"
    keep "$out/schedules/schedules.png" jobs/schedules.png
}

long_video_steps() {
    measured long_video_steps python tests/benchmarks/long_video_steps.py --repeats "${REPEATS:-3}" --out "$out"
    keep "$out/long_video_steps.png" jobs/long_video_steps.png
}

contact_sheet() {
    rlfuse prepare long_video
    train contact_sheet experiment=long_video trainer.log_samples=32
    python tests/benchmarks/pictures.py sheet "$out/runs/pictures/contact_sheet" "$out/contact_sheet.png"
    keep "$out/contact_sheet.png" jobs/contact_sheet.png
}

proxy_and_truth() {
    local weights against remedy=${REMEDY:-algorithm.kl_ctrl.kl_coef=0.2}
    rlfuse prepare quickstart
    rlfuse prepare preferences
    rm -rf "$out/runs/pictures/reward_model"
    rlfuse train experiment=reward_model $runs trainer.experiment_name=reward_model
    weights=$(ls -d "$out"/runs/pictures/reward_model/global_step_*/reward_model/huggingface | tail -n 1)
    against="experiment=quickstart reward.model_path=$weights reward.weights=[0,1] trainer.test_freq=2"
    train proxy-alone $against
    train proxy-remedy $against "$remedy"
    python tests/benchmarks/pictures.py proxy "$out/proxy_and_truth.png" \
        "the reward model alone=$out/runs/pictures/proxy-alone" \
        "the same with $remedy=$out/runs/pictures/proxy-remedy"
    keep "$out/proxy_and_truth.png" jobs/proxy_and_truth.png
}

gpu_slot() {
    python tests/benchmarks/pictures.py model "$out/Qwen2.5-7B-Instruct"
    local job=$PWD/jobs/ppo_7b.yaml
    (cd "$out"; rlfuse plan "$job" model.path=Qwen2.5-7B-Instruct --device-memory 80 --memory-picture gpu_slot.png)
    keep "$out/gpu_slot.png" jobs/gpu_slot.png
}

left=()
for picture in "$@"; do
    began=$SECONDS
    # In a subshell, which an error ends, so that the other pictures are still made.
    set +e
    (set -e; "$picture")
    status=$?
    set -e
    [ "$status" -eq 0 ] || left+=("$picture (status $status)")
    echo "[pictures] $picture took $((SECONDS - began)) s"
done
[ "${#left[@]}" -eq 0 ] || { echo "[pictures] not made: ${left[*]}; see above and $out/*.quiet"; exit 3; }
