#!/bin/sh
# Builds .venv in the project folder with the newest Python that works here. Where that is done already, it returns at once and
# needs no network.
#
#   scripts/make_environment.sh                 build, or bring up to date
#   scripts/make_environment.sh --interpreters  print the usable interpreters, newest first, and build nothing
#   scripts/make_environment.sh --remove        remove .venv if it was built here
#
# Nothing outside the project folder is changed: no system package, no shell profile.
set -eu
CDPATH='' cd -- "$(dirname -- "$0")/.."

packages_mb=225     # what pip downloads
installed_mb=970    # what .venv takes on disk
model_mb=98
mark=.venv/specjax-environment
log=.venv/install.log
unreachable="The package index cannot be reached. Connect to the network and run make again."

say() { printf '%s\n' "$*" >&2; }
stop() { say "$*"; exit 1; }

# Prints VERSION, a tab and the path of the interpreter behind "$1", or nothing. Only running it tells: a shim may lead nowhere.
# shellcheck disable=SC2016
probe() {
    "$1" -c '
import sys, sysconfig, venv
version = sys.version_info
assert sys.implementation.name == "cpython" and version >= (3, 11) and version[3] == "final" and sys.maxsize > 2**32
assert not sysconfig.get_config_var("Py_GIL_DISABLED")
path = getattr(sys, "_base_executable", None) or sys.executable  # not an activated environment, which may be .venv itself
print("%d.%d.%d\t%s" % (version[0], version[1], version[2], path))
' 2>/dev/null </dev/null || :
}

# Every name on every folder of PATH, since one that fails may hide one that works; then pyenv's and uv's own folders.
candidates() (
    set -f
    IFS=:
    for folder in $PATH; do
        set +f
        for path in "$folder"/python3.[1-9][0-9] "$folder"/python3 "$folder"/python; do
            if [ -x "$path" ]; then printf '%s\n' "$path"; fi
        done
    done
    pyenv=$(pyenv root 2>/dev/null) || pyenv=${PYENV_ROOT:-${HOME:-/nonexistent}/.pyenv}
    uv=$(uv python dir 2>/dev/null) || uv=/nonexistent
    for path in "$pyenv"/versions/*/bin/python "$uv"/*/bin/python3; do
        if [ -x "$path" ]; then printf '%s\n' "$path"; fi
    done
)

# Moved aside first: a half removed .venv would have lost its mark.
remove() {
    rm -rf .venv.new .venv.old
    if [ -e .venv ]; then mv .venv .venv.old; fi
    rm -rf .venv.old
}

# Usable interpreters, newest first; of equal versions, the one that PATH finds first.
interpreters() {
    candidates | while IFS= read -r path; do probe "$path"; done |
        awk -F '\t' '!seen[$1]++ { split($1, v, "."); printf "%03d%03d%03d\t%06d\t%s\n", v[1], v[2], v[3], NR, $0 }' |
        sort -k1,1r -k2,2 | cut -f 3,4
}

# The pip to install with, as a command that takes pip's arguments. A pip from outside needs neither ensurepip in the new
# environment nor the right to change the system.
with_pip() {
    case $installer in
        own) "$python" -m pip --python .venv/bin/python "$@" ;;
        ensured) .venv/bin/python -m pip "$@" ;;
        other) "$other" -m pip --python .venv/bin/python "$@" ;;
    esac </dev/null
}

choose_installer() {
    installer=own
    if with_pip --version; then return; fi
    installer=ensured
    if .venv/bin/python -m ensurepip && with_pip --version; then return; fi
    installer=other
    while IFS="$tab" read -r _ other; do
        if with_pip --version; then return; fi
    done <<END
$usable
END
    installer=uv
    uv --version
}

# Called as a condition, where "set -e" does not hold: hence the chains.
install() {
    if [ "$installer" = uv ]; then
        uv pip install --python .venv/bin/python -e '.[test]' </dev/null
    else
        # Wheels only: a package without one for this Python should fail now, not in a compiler minutes later.
        with_pip --disable-pip-version-check --log "$log" install --no-user --only-binary=:all: -e '.[test]'
    fi &&
        .venv/bin/python -c 'import flax, jax, tokenizers' && # jaxlib refuses processors that it was not built for
        printf 'complete %s\n' "$wanted" >"$mark"
}

offline() {
    grep -q -E 'NewConnectionError|NameResolutionError|ProxyError|ConnectTimeout|Max retries exceeded|Network is unreachable' "$log" 2>/dev/null
}

tab=$(printf '\t')
place=$(pwd -P)
wanted="$(cksum <pyproject.toml) $place"
found=$(cat "$mark" 2>/dev/null) || found=

case ${1:-} in
    --interpreters)
        interpreters
        exit 0
        ;;
    --remove)
        if [ -e "$mark" ]; then remove; fi
        exit 0
        ;;
    ?*) stop "make_environment.sh: '$1' is not an option; there are --interpreters and --remove" ;;
esac

if [ -e .venv ] && [ ! -e "$mark" ]; then
    stop ".venv is here already and was not made by make: move it away (mv .venv my-venv) and run make again."
fi

# The mark says "complete" only at the very end, so a build that was cut short is begun anew.
case $found in
    "complete "*" $place")
        if .venv/bin/python -c '' 2>/dev/null; then
            if [ "$found" = "complete $wanted" ]; then exit 0; fi
            say "Bringing .venv up to date with pyproject.toml"
            echo updating >"$mark"
            installer=ensured
            rm -f "$log"
            if install; then exit 0; fi
            if offline; then
                printf '%s\n' "$found" >"$mark"
                stop "$unreachable"
            fi
        fi
        ;;
esac

usable=$(interpreters)
if [ -z "$usable" ]; then
    stop "No Python of at least 3.11 runs here. Install one, for example: apt install python3 python3-venv"
fi
say "The first run downloads about $packages_mb MB of packages (about $installed_mb MB in .venv); the default model, $model_mb MB, comes when it is first used."
while IFS="$tab" read -r version python; do
    say "Building .venv with Python $version ($python)"
    remove
    mkdir .venv.new
    echo making >".venv.new/${mark#*/}"
    mv .venv.new .venv
    "$python" -m venv --without-pip --prompt specjax .venv
    if ! choose_installer >/dev/null 2>&1; then
        stop "There is no pip for Python $version. Install it, for example: apt install python3-venv"
    fi
    if install; then exit 0; fi
    if offline; then stop "$unreachable"; fi
    say "Python $version did not work (see above)."
done <<END
$usable
END
stop "No Python here could install the packages; the messages above say why. Interpreters tried: $(printf '%s' "$usable" | cut -f 1 | tr '\n' ' ')"
