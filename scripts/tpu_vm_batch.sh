#!/bin/sh
# Runs one batch job on all hosts of a TPU VM (a pod slice has several): the same `specjax batch` on each; they find one another.
#
#   scripts/tpu_vm_batch.sh --name TPU --zone ZONE [--project PROJECT] [--folder FOLDER] [--dry-run] -- IN.jsonl OUT.jsonl OPTIONS...
#
#   --name TPU         the TPU VM's name
#   --zone ZONE        where it is
#   --project PROJECT  if it is not gcloud's own
#   --folder FOLDER    on the hosts: a checkout with specjax in its .venv; paths of the job start there. Default: specjax, in the home
#   --dry-run          print the command and run nothing
#   OPTIONS            of `specjax batch`; --mesh must be one of them
#
# Host 0 alone reads IN.jsonl and writes OUT.jsonl. When a host dies the job ends on all; the same command goes on.
#
#   scripts/tpu_vm_batch.sh --name my-v5e-16 --zone us-west4-a -- in.jsonl out.jsonl --model llama.gguf --mesh data=8,model=2
set -eu

say() { printf '%s\n' "$*" >&2; }
wrong() { say "tpu_vm_batch.sh: $*"; exit 2; }

# Prints the arguments so that a shell reads them as they are.
quoted() {
    between=
    for rest; do
        printf '%s' "$between"
        between=' '
        case $rest in
            '' | *[!A-Za-z0-9_./:=,@%+-]*) ;;
            *) printf '%s' "$rest"; continue ;;
        esac
        printf "'"
        while :; do
            case $rest in
                *\'*) printf "%s'\\''" "${rest%%\'*}"; rest=${rest#*\'} ;;
                *) break ;;
            esac
        done
        printf "%s'" "$rest"
    done
}

name='' zone='' project='' folder=specjax dry=''
while [ $# -gt 0 ]; do
    option=$1
    case $option in
        --) break ;;
        --dry-run) dry=yes; shift; continue ;;
        -h | --help) sed -n 's/^# \{0,1\}//p' "$0" | sed '/^!/d'; exit 0 ;;
        --name | --zone | --project | --folder)
            [ $# -gt 1 ] || wrong "$option needs a value"
            value=$2
            shift 2
            ;;
        --name=* | --zone=* | --project=* | --folder=*)
            value=${option#*=}
            shift
            ;;
        *) wrong "there is no option $option; options of specjax batch come behind --" ;;
    esac
    [ -n "$value" ] || wrong "${option%%=*} is empty"
    case $option in
        --name*) name=$value ;;
        --zone*) zone=$value ;;
        --project*) project=$value ;;
        --folder*) folder=$value ;;
    esac
done
[ -n "$name" ] || wrong "--name is missing: the TPU VM's name"
[ -n "$zone" ] || wrong "--zone is missing: where the TPU VM $name is"
[ $# -gt 0 ] || wrong "the job is missing: -- IN.jsonl OUT.jsonl --mesh data=N,model=M"
shift
[ $# -ge 2 ] || wrong "IN.jsonl and OUT.jsonl must come behind --"
mesh=
for argument; do
    case $argument in
        --mesh | --mesh=*) mesh=yes ;;
        --distributed) wrong "--distributed is added here; leave it out" ;;
        --coordinator-address* | --num-processes* | --process-id*) wrong "${argument%%=*} is found by the hosts; leave it out" ;;
    esac
done
[ -n "$mesh" ] || wrong "--mesh is missing: it says how the chips of all hosts work together, such as --mesh data=8,model=2"
[ -n "$dry" ] || command -v gcloud >/dev/null || wrong "gcloud is not here; it comes with the Google Cloud SDK"

# A folder that does not start with / is in the home, where ssh begins.
command="cd $(quoted "$folder") && exec .venv/bin/specjax batch $(quoted "$@") --distributed"
set -- gcloud compute tpus tpu-vm ssh "$name" "--zone=$zone" --worker=all "--command=$command"
[ -z "$project" ] || set -- "$@" "--project=$project"
if [ -n "$dry" ]; then
    quoted "$@"
    printf '\n'
    exit 0
fi
exec "$@"
