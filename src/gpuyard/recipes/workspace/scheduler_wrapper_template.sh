#!/bin/sh
# The commands of this workspace, from any working directory: ./scheduler.sh help
# It only forwards to gpuyard; `gpuyard workspace init --force` makes it anew.

self=$0
case $self in
    /*) ;;
    *) self=./$self ;;
esac
# A link from elsewhere is followed; one in a workspace stands for that workspace. The x keeps newlines at the end.
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
printf 'scheduler.sh: gpuyard is not on PATH, and %s does not have it\n' "$python" >&2
echo 'hint: install it (pip install gpuyard), or activate the environment that it is in' >&2
exit 127
