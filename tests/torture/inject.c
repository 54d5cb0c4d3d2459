/* LD_PRELOAD library: fails chosen calls of chosen processes. The torture run preloads it into the daemon, its keepers
 * and its clients, and controls it through a shared file (inject.py), named by TORTURE_CONTROL. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

enum { RULES = 8, WRITE = 1, SYNC = 2, SPAWN = 4 };

struct rule {
    int32_t pid;      /* 0: the rule is not used */
    uint32_t calls;   /* WRITE, SYNC and SPAWN, added up */
    int32_t error;    /* errno */
    uint32_t one_in;  /* every so manieth call fails */
};

static volatile struct rule *rules;
static unsigned calls_made;

__attribute__((constructor)) static void open_control(void) {
    const char *path = getenv("TORTURE_CONTROL");
    int file = path != NULL ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0) return;
    void *mapped = mmap(NULL, RULES * sizeof *rules, PROT_READ, MAP_SHARED, file, 0);
    if (mapped != MAP_FAILED) rules = mapped;
    close(file);
}

static int failure(uint32_t call) {
    if (rules == NULL) return 0;
    for (int i = 0; i < RULES; i++) {
        volatile struct rule *rule = &rules[i];
        if (rule->pid != 0 && (rule->calls & call) && rule->pid == getpid() &&
            __sync_fetch_and_add(&calls_made, 1) % (rule->one_in ? rule->one_in : 1) == 0)
            return rule->error;
    }
    return 0;
}

/* Only files on disks fail: an error on a socket or a pipe would be another fault. */
static int fails(uint32_t call, int file) {
    int error = failure(call);
    struct stat status;
    if (error == 0 || fstat(file, &status) != 0 || !S_ISREG(status.st_mode)) return 0;
    errno = error;
    return 1;
}

#define NEXT(name) \
    static __typeof__(&name) next; \
    if (next == NULL) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

ssize_t write(int file, const void *content, size_t length) {
    NEXT(write);
    return fails(WRITE, file) ? -1 : next(file, content, length);
}

ssize_t pwrite(int file, const void *content, size_t length, off_t at) {
    NEXT(pwrite);
    return fails(WRITE, file) ? -1 : next(file, content, length, at);
}

ssize_t pwrite64(int file, const void *content, size_t length, off64_t at) {
    NEXT(pwrite64);
    return fails(WRITE, file) ? -1 : next(file, content, length, at);
}

int fsync(int file) {
    NEXT(fsync);
    return fails(SYNC, file) ? -1 : next(file);
}

int fdatasync(int file) {
    NEXT(fdatasync);
    return fails(SYNC, file) ? -1 : next(file);
}

pid_t fork(void) {
    NEXT(fork);
    int error = failure(SPAWN);
    if (error == 0) return next();
    errno = error;
    return -1;
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*start)(void *), void *argument) {
    NEXT(pthread_create);
    int error = failure(SPAWN);
    return error != 0 ? error : next(thread, attributes, start, argument);
}

/* The daemon gives its keeper a bare environment: hand on what leads here. */
static const char *const handed_on[] = {"LD_PRELOAD", "TORTURE_CONTROL", "CLOCK_SHIFT"};
enum { HANDED_ON = sizeof handed_on / sizeof *handed_on };

static int has(char *const *environment, const char *name) {
    size_t length = strlen(name);
    for (; environment != NULL && *environment != NULL; environment++)
        if (strncmp(*environment, name, length) == 0 && (*environment)[length] == '=') return 1;
    return 0;
}

int posix_spawn(pid_t *pid, const char *path, const posix_spawn_file_actions_t *actions,
                const posix_spawnattr_t *attributes, char *const arguments[], char *const environment[]) {
    NEXT(posix_spawn);
    int error = failure(SPAWN);
    if (error != 0) return error;
    size_t count = 0, added = 0;
    while (environment != NULL && environment[count] != NULL) count++;
    char **wider = calloc(count + HANDED_ON + 1, sizeof *wider);
    if (wider == NULL) return ENOMEM;
    if (count != 0) memcpy(wider, environment, count * sizeof *wider);
    for (int i = 0; i < HANDED_ON; i++) {
        const char *value = getenv(handed_on[i]);
        if (value != NULL && !has(environment, handed_on[i]) &&
            asprintf(&wider[count + added], "%s=%s", handed_on[i], value) > 0)
            added++;
    }
    error = next(pid, path, actions, attributes, arguments, wider);
    while (added > 0) free(wider[count + --added]);
    free(wider);
    return error;
}
