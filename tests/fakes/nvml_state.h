/* The state of the fake NVML: the text file named by FAKE_NVML_STATE, a keyword and its arguments per line.
 *
 *     driver VERSION                     init RESULT
 *     device UUID                        a card, followed by its lines; its index is its place among the cards
 *     instance UUID PLACE GI CI          a MIG instance of the card above, followed by its lines
 *     name TEXT                          pci BUS_ID
 *     memory TOTAL RESERVED USED         in bytes
 *     utilization PERCENT                temperature CELSIUS
 *     power MILLIWATTS                   power_limit MILLIWATTS             energy MILLIJOULES
 *     mig CURRENT PENDING PLACES         of a card that can be split; PLACES is how many instances fit
 *     process compute|graphics|mps PID BYTES|hidden
 *     sample PID MICROSECONDS PERCENT    of a process's work; a card without any does not sample
 *     nvlink BUS_ID|switch|off           an NVLink to a card, to an NVSwitch, or without a connection
 *     shares BUS_ID LEVEL                what it shares with another card on PCIe, as a level of NVML
 *     apart                              peers do not reach it through NVSwitches
 *     ecc UNCORRECTED                    remap PENDING FAILED
 *     throttle MASK                      link WIDTH MAX
 *     xid NUMBER CODE                    an event that is delivered once; NUMBERs rise over all devices and states
 *     result FUNCTION CODE               hang FUNCTION SECONDS
 *
 * A `result` or `hang` before the first device is of the library, a later one of the device or instance above it.
 * FUNCTION may end in `*`. A bare `*` on a card stands for all that take its handle or one of its instances'.
 * A state that cannot be understood aborts, loudly: it is a mistake in a test. */

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MAX_DEVICES 128
#define MAX_PROCESSES 4096
#define MAX_WORKS 256
#define MAX_RULES 256
#define MAX_LINKS 512
#define MAX_XIDS 256
#define LIBRARY (-1)
#define NO_INSTANCE 0xFFFFFFFFu

typedef unsigned long long Bytes;

typedef struct {
    char uuid[96], name[96], bus_id[32];
    int parent, has_memory, is_apart, mig_mode, mig_pending; /* `parent` and the modes are -1 where there are none */
    unsigned index, gi, ci, places;
    Bytes total, reserved, used;
    long long utilization, temperature, power, power_limit, energy; /* -1 where the device does not tell */
    long long ecc, remap_pending, remap_failed, throttle, link, link_max;
} Device;

typedef struct { int device; char kind[16]; unsigned pid; Bytes used; } Process;
typedef struct { int device; unsigned pid, percent; unsigned long long at; } Work;
typedef struct { int device; char end[32]; } NvLink;
typedef struct { int device, level; char bus_id[32]; } Level;
typedef struct { int device, number; unsigned code; } Xid;
typedef struct { int device; char function[80]; int code; double hang_s; } Rule;

typedef struct {
    char driver[80];
    int init, devices, processes, works, rules, cards, links, levels, xids;
    Device device[MAX_DEVICES];
    Process process[MAX_PROCESSES];
    Work work[MAX_WORKS];
    Rule rule[MAX_RULES];
    NvLink link[MAX_LINKS];
    Level level[MAX_LINKS];
    Xid xid[MAX_XIDS];
} State;

static _Thread_local State state;

__attribute__((noreturn, format(printf, 1, 2))) static void give_up(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs("fake NVML: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    abort();
}

static Device *add_device(int parent) {
    if (state.devices == MAX_DEVICES) give_up("more than %d devices", MAX_DEVICES);
    Device *device = &state.device[state.devices++];
    *device = (Device){.parent = parent, .mig_mode = -1, .mig_pending = -1, .gi = NO_INSTANCE, .ci = NO_INSTANCE,
                       .utilization = -1, .temperature = -1, .power = -1, .power_limit = -1,
                       .ecc = -1, .remap_pending = -1, .remap_failed = -1, .throttle = -1, .link = -1, .link_max = -1,
                       .energy = -1};
    if (parent < 0) device->index = (unsigned)state.cards++;
    return device;
}

static int card_above(void) {
    int place = state.devices - 1;
    return place >= 0 && state.device[place].parent >= 0 ? state.device[place].parent : place;
}

static int read_process(const char *text) {
    char used[32];
    if (state.processes == MAX_PROCESSES) give_up("more than %d processes", MAX_PROCESSES);
    Process *process = &state.process[state.processes++];
    process->device = state.devices - 1;
    if (sscanf(text, "%15s %u %31s", process->kind, &process->pid, used) != 3) return 0;
    process->used = strcmp(used, "hidden") == 0 ? ~0ULL : strtoull(used, NULL, 10);
    return 1;
}

static int read_work(const char *text) {
    if (state.works == MAX_WORKS) give_up("more than %d samples", MAX_WORKS);
    Work *work = &state.work[state.works++];
    work->device = state.devices - 1;
    return sscanf(text, "%u %llu %u", &work->pid, &work->at, &work->percent) == 3;
}

static int read_link(const char *text) {
    if (state.links == MAX_LINKS) give_up("more than %d NVLinks", MAX_LINKS);
    NvLink *link = &state.link[state.links++];
    link->device = state.devices - 1;
    return sscanf(text, "%31s", link->end) == 1;
}

static int read_level(const char *text) {
    if (state.levels == MAX_LINKS) give_up("more than %d pairs", MAX_LINKS);
    Level *level = &state.level[state.levels++];
    level->device = state.devices - 1;
    return sscanf(text, "%31s %d", level->bus_id, &level->level) == 2;
}

static int read_xid(const char *text) {
    if (state.xids == MAX_XIDS) give_up("more than %d Xids", MAX_XIDS);
    Xid *xid = &state.xid[state.xids++];
    xid->device = state.devices - 1;
    return sscanf(text, "%d %u", &xid->number, &xid->code) == 2;
}

#define IS(word) (strcmp(keyword, word) == 0)

static int read_rule(const char *keyword, const char *text) {
    if (state.rules == MAX_RULES) give_up("more than %d rules", MAX_RULES);
    Rule *rule = &state.rule[state.rules++];
    *rule = (Rule){.device = state.devices ? state.devices - 1 : LIBRARY};
    return IS("result") ? sscanf(text, "%79s %d", rule->function, &rule->code) == 2
                        : sscanf(text, "%79s %lf", rule->function, &rule->hang_s) == 2;
}

static int read_of_device(Device *device, const char *keyword, const char *text) {
    if (IS("name")) return sscanf(text, "%95[^\n]", device->name) == 1;
    if (IS("pci")) return sscanf(text, "%31s", device->bus_id) == 1;
    if (IS("utilization")) return sscanf(text, "%lld", &device->utilization) == 1;
    if (IS("temperature")) return sscanf(text, "%lld", &device->temperature) == 1;
    if (IS("power")) return sscanf(text, "%lld", &device->power) == 1;
    if (IS("energy")) return sscanf(text, "%lld", &device->energy) == 1;
    if (IS("power_limit")) return sscanf(text, "%lld", &device->power_limit) == 1;
    if (IS("mig")) return sscanf(text, "%d %d %u", &device->mig_mode, &device->mig_pending, &device->places) == 3;
    if (IS("ecc")) return sscanf(text, "%lld", &device->ecc) == 1;
    if (IS("remap")) return sscanf(text, "%lld %lld", &device->remap_pending, &device->remap_failed) == 2;
    if (IS("throttle")) return sscanf(text, "%lld", &device->throttle) == 1;
    if (IS("link")) return sscanf(text, "%lld %lld", &device->link, &device->link_max) == 2;
    if (IS("xid")) return read_xid(text);
    if (IS("process")) return read_process(text);
    if (IS("sample")) return read_work(text);
    if (IS("nvlink")) return read_link(text);
    if (IS("shares")) return read_level(text);
    if (IS("apart")) return device->is_apart = 1;
    if (!IS("memory")) return 0;
    device->has_memory = 1;
    return sscanf(text, "%llu %llu %llu", &device->total, &device->reserved, &device->used) == 3;
}

static int read_line(const char *keyword, const char *text) {
    if (IS("driver")) return sscanf(text, "%79s", state.driver) == 1;
    if (IS("init")) return sscanf(text, "%d", &state.init) == 1;
    if (IS("result") || IS("hang")) return read_rule(keyword, text);
    if (IS("device")) return sscanf(text, "%95s", add_device(-1)->uuid) == 1;
    if (state.devices == 0) return 0;
    if (IS("instance")) {
        Device *device = add_device(card_above());
        return sscanf(text, "%95s %u %u %u", device->uuid, &device->index, &device->gi, &device->ci) == 4;
    }
    return read_of_device(&state.device[state.devices - 1], keyword, text);
}

static void read_state(void) {
    char line[512], keyword[32];
    const char *path = getenv("FAKE_NVML_STATE");
    FILE *file = path ? fopen(path, "re") : NULL;
    if (file == NULL) give_up("FAKE_NVML_STATE names no file that can be read: %s", path ? path : "it is not set");
    state.driver[0] = '\0';
    state.init = state.devices = state.processes = state.works = state.rules = state.cards = state.xids = 0;
    state.links = state.levels = 0;
    while (fgets(line, sizeof line, file)) {
        int length = 0;
        if (sscanf(line, "%31s %n", keyword, &length) != 1) continue;
        if (!read_line(keyword, line + length)) give_up("cannot understand: %s", line);
    }
    fclose(file);
}
