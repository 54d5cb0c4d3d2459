#!/bin/sh
# Runs the commands of this workspace from any working directory: ./scheduler.sh help
# It only forwards to gpuyard; `gpuyard workspace init --force` writes it again.

self=$0
case $self in
    /*) ;;
    *) self=./$self ;;
esac
# Follow a symbolic link, unless it is in a workspace: then that workspace is used. The x keeps trailing newlines.
while [ -L "$self" ] && [ ! -e "${self%/*}/scheduler_config.yml" ]; do
    target=$(readlink "$self" && echo x) || exit
    target=${target%??}
    case $target in
        /*) self=$target ;;
        *) self=${self%/*}/$target ;;
    esac
done
here=${self%/*}/

[ $# -gt 0 ] || set -- help
if command -v gpuyard >/dev/null 2>&1; then
    exec gpuyard workspace --workspace "$here" "$@"
fi
python=python3
if "$python" -P -c 'import gpuyard' 2>/dev/null; then
    exec "$python" -P -m gpuyard workspace --workspace "$here" "$@"
fi
printf 'scheduler.sh: gpuyard is not on PATH, and %s cannot import it\n' "$python" >&2
echo 'hint: install it (pip install gpuyard), or activate the environment that has it' >&2
exit 127
