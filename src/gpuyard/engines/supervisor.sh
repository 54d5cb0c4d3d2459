# Runs one attempt of a job, and writes to the journal what became of it:
#
#     sh supervisor.sh KEY UMASK LOG DIRECTORY STDIN RESTORE PLACES PROGRAM [ARGUMENT]...
#
# Descriptors: 0 is the gate (a line lets one supervisor go; its end means that the daemon is gone), 8 the lease, which
# the program inherits, 9 the journal. RESTORE puts back those variables of the job's that a shell would not pass on as
# they were; PLACES is where to look for a program without a slash in its name, each followed by a colon, if not on PATH.
# Until the program runs there is no fork: each would cost as much as all the rest. Variables of our own would end up in
# the job's environment where it has the same names, so there are three, which RESTORE puts back too.

# Caught, so that a signal to the whole group leaves us to tell of the end, and the program has the default. While the
# program is in the foreground the shell waits for it, whatever it catches.
trap : HUP INT QUIT PIPE ALRM TERM USR1 USR2 TSTP TTIN TTOU XCPU XFSZ VTALRM PROF

# report KEY WORD: begins with a newline because another's line may have been cut off by a full disk, and ends with a
# dot because our own may. Nobody can be told but through the journal, so it is tried until it works.
report() {
    until printf '\n%s %s %s .\n' "$1" "$$" "$2" >&9; do
        PATH="$PATH:/usr/bin:/bin" sleep 1
    done
}

# leave KEY WORD [MESSAGE]
leave() {
    trap - EXIT
    [ -z "${3-}" ] || printf 'gpuyard: %s\n' "$3"
    report "$1" "$2"
    exit 0
}

# find PLACES PROGRAM: where it is, in gpuyard_place; where nothing can be run, the first that is at least there.
find() {
    gpuyard_place=
    case $2 in
    */*)
        gpuyard_place=$2
        is_program "$2"
        return
        ;;
    esac
    gpuyard_rest=$1
    while [ -n "$gpuyard_rest" ]; do
        if is_program "${gpuyard_rest%%:*}/$2"; then
            gpuyard_place=${gpuyard_rest%%:*}/$2
            return 0
        fi
        if [ -z "$gpuyard_place" ] && [ -f "${gpuyard_rest%%:*}/$2" ]; then
            gpuyard_place=${gpuyard_rest%%:*}/$2
        fi
        gpuyard_rest=${gpuyard_rest#*:}
    done
    return 1
}

is_program() {
    [ -f "$1" ] && [ -x "$1" ]
}

# run KEY ... PROGRAM [ARGUMENT]...: always by a path, as `exit` or `true` alone would be the shell's own.
run() {
    shift 8
    set -- "$gpuyard_place" "$@"
    restore
    "$@" 2>&1 9>&-
}

read -r gpuyard_word || leave "$1" unbegun

# The shell ends by itself where it cannot fork.
trap "report $1 no-process" EXIT
eval "restore() { $6
}"

umask 077
command exec >>"$3" || leave "$1" no-log
umask "$2"
cd -P -- "$4" || leave "$1" no-directory "the directory $4 is not there, or cannot be entered"
command exec <"$5" || leave "$1" no-stdin "the input $5 cannot be read"
if ! find "${7:-$PATH:}" "$8"; then
    if [ -e "$gpuyard_place" ]; then
        leave "$1" not-executable "$gpuyard_place cannot be executed"
    fi
    leave "$1" no-program "there is no program $8"
fi

run "$@"
leave "$1" "$?"
