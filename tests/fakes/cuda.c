/* A stand-in for NVIDIA's libcuda.so.1, as far as it moves a process's device memory away and back, so that the real
 * ctypes path runs where there is no driver. It answers as driver 580 was seen to.
 *
 * The state is a folder, named by FAKE_CUDA_STATE:
 *     PID                a process that uses the device: its state's number, and `ruined` behind it where it is
 *     rules              FUNCTION PID|* ACTION [CODE] a line, such as `Restore 17 fail 2`; the first that fits counts
 *     calls              what was called and went on, a line each: FUNCTION PID CODE
 *     at-FUNCTION        made when a call pauses, which then waits for the file go-FUNCTION
 * The actions:
 *     fail CODE          gives the code and changes nothing, but a failed Restore ruins the process
 *     pause              waits before it does anything
 *     pause-after        does it, and waits before it returns
 *     end                the process is killed meanwhile
 *
 * As the real one it waits for a process that is stopped. */

#define _POSIX_C_SOURCE 200809L
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { RUNNING, LOCKED, CHECKPOINTED };
enum { SUCCESS = 0, NOT_INITIALIZED = 3, OPERATING_SYSTEM = 304, ILLEGAL_STATE = 401, NOT_READY = 600 };

typedef struct { unsigned timeout_ms, reserved[15]; } Args;
typedef struct { int state, is_ruined; } Process;
typedef struct { char action[16]; int code; } Rule;

typedef struct { char text[512]; } Path;

static Path path_of(const char *name) {
    Path path;
    const char *folder = getenv("FAKE_CUDA_STATE");
    if (folder == NULL) abort();
    snprintf(path.text, sizeof path.text, "%s/%s", folder, name);
    return path;
}

static FILE *open_in_state(const char *name, const char *mode) { return fopen(path_of(name).text, mode); }

static void wait_a_little(void) { nanosleep(&(struct timespec){.tv_nsec = 2000000}, NULL); }

static void close_if(FILE *file) {
    if (file) fclose(file);
}

static int exists(const char *name) {
    FILE *file = open_in_state(name, "re");
    close_if(file);
    return file != NULL;
}

static char kernel_state(int pid) {
    char path[64], text[512] = "", *end;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    FILE *file = fopen(path, "re");
    if (file == NULL) return 'X';
    if (fgets(text, sizeof text, file) == NULL) text[0] = '\0';
    fclose(file);
    end = strrchr(text, ')');
    return end ? end[2] : 'X';
}

static int read_process(int pid, Process *process) {
    char name[32], word[16] = "";
    snprintf(name, sizeof name, "%d", pid);
    FILE *file = open_in_state(name, "re");
    if (file == NULL) return 0;
    const int found = fscanf(file, "%d %15s", &process->state, word);
    process->is_ruined = strcmp(word, "ruined") == 0;
    fclose(file);
    return found >= 1;
}

/* Others see the old state or the new one, never half of it. */
static void write_process(int pid, const Process *process) {
    char name[32], fresh[32];
    snprintf(name, sizeof name, "%d", pid);
    snprintf(fresh, sizeof fresh, "%d.fresh", pid);
    FILE *file = open_in_state(fresh, "we");
    if (file == NULL) abort();
    fprintf(file, "%d%s\n", process->state, process->is_ruined ? " ruined" : "");
    fclose(file);
    if (rename(path_of(fresh).text, path_of(name).text) != 0) abort();
}

static Rule rule_for(const char *function, int pid) {
    char line[128], name[32], who[16];
    Rule rule = {.action = ""};
    FILE *file = open_in_state("rules", "re");
    while (file && fgets(line, sizeof line, file)) {
        Rule read = {.action = ""};
        if (sscanf(line, "%31s %15s %15s %d", name, who, read.action, &read.code) < 3) abort();
        if (strcmp(name, function) == 0 && (strcmp(who, "*") == 0 || atoi(who) == pid)) {
            rule = read;
            break;
        }
    }
    close_if(file);
    return rule;
}

static void pause_at(const char *function) {
    char name[64];
    snprintf(name, sizeof name, "at-%s", function);
    close_if(open_in_state(name, "we"));
    snprintf(name, sizeof name, "go-%s", function);
    while (!exists(name)) wait_a_little();
}

static int record(const char *function, int pid, int code) {
    FILE *file = open_in_state("calls", "ae");
    if (file == NULL) abort();
    fprintf(file, "%s %d %d\n", function, pid, code);
    fclose(file);
    return code;
}

static int begin(int pid, Process *process) {
    if (kill(pid, 0) != 0 || strchr("ZX", kernel_state(pid))) return OPERATING_SYSTEM;
    if (!read_process(pid, process)) return NOT_INITIALIZED;
    while (kernel_state(pid) == 'T') wait_a_little();
    return SUCCESS;
}

static int move(const char *function, int pid, int from, int to) {
    Process process;
    int code = begin(pid, &process);
    if (code != SUCCESS) return record(function, pid, code);
    const Rule rule = rule_for(function, pid);
    const int is_restore = from == CHECKPOINTED;
    if (strcmp(rule.action, "pause") == 0) pause_at(function);
    if (strcmp(rule.action, "end") == 0) {
        kill(pid, SIGKILL);
        while (!strchr("ZX", kernel_state(pid))) wait_a_little();
        return record(function, pid, OPERATING_SYSTEM);
    }
    if (process.state != from) code = ILLEGAL_STATE;
    else if (is_restore && process.is_ruined) code = OPERATING_SYSTEM;
    else if (strcmp(rule.action, "fail") == 0) {
        code = rule.code;
        process.is_ruined |= is_restore;
    } else process.state = to;
    write_process(pid, &process);
    if (strcmp(rule.action, "pause-after") == 0) pause_at(function);
    return record(function, pid, code);
}

int cuInit(unsigned flags) { return (int)flags; }

#ifndef OLD_DRIVER
int cuCheckpointProcessGetState(int pid, int *state) {
    Process process;
    const int code = begin(pid, &process);
    if (code == SUCCESS) *state = process.state;
    return code;
}

int cuCheckpointProcessLock(int pid, const Args *args) {
    if (args->timeout_ms == 0) abort(); /* it would wait for ever */
    return move("Lock", pid, RUNNING, LOCKED);
}

#define MOVE(function, from, to)                                          \
    int cuCheckpointProcess##function(int pid, const Args *args) {        \
        static const Args nothing;                                        \
        if (memcmp(args, &nothing, sizeof nothing) != 0) abort();         \
        return move(#function, pid, from, to);                            \
    }

MOVE(Checkpoint, LOCKED, CHECKPOINTED)
MOVE(Restore, CHECKPOINTED, LOCKED)
MOVE(Unlock, LOCKED, RUNNING)
#endif
