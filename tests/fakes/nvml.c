/* A stand-in for NVIDIA's libnvidia-ml.so.1, so that the real ctypes path runs where there is no driver.
 *
 * Rules:
 * - The state is read anew at every call (nvml_state.h says how it is written): a test changes it by renaming another
 *   file over it, and a process that has the library loaded sees the change at its next call.
 * - No call shares memory with another one but the count of nvmlInit, so threads and forks need no lock.
 * - A handle is the hash of a UUID. One that the state no longer knows is that of a lost card.
 * - A figure that is not in the state is not supported by the device.
 * - With OLD_DRIVER the functions that came with driver 510 and later are missing, as they are in 470. */

#define _POSIX_C_SOURCE 200809L
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

#include "nvml_state.h"

#define ANY "*"
#define MEMORY_V2 0x02000028u
#define TEMPERATURE_V1 0x0100000Cu

typedef const void *Handle;
typedef enum {
    SUCCESS = 0, UNINITIALIZED = 1, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7,
    TIMED_OUT = 10, GPU_IS_LOST = 15, VERSION_MISMATCH = 25
} Code;

typedef struct { Bytes total, free, used; } Memory;
typedef struct { unsigned version; Bytes total, reserved, free, used; } MemoryV2;
typedef struct { unsigned gpu, memory; } Utilization;
typedef struct { unsigned version, sensor; int celsius; } Temperature;
typedef struct { unsigned pid; unsigned long long at; unsigned sm, memory, encoder, decoder; } Sample;
typedef struct { unsigned pid; Bytes used; } ProcessV1;
typedef struct { unsigned pid; Bytes used; unsigned gi, ci; } ProcessV2;
typedef struct {
    char bus_id_legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char bus_id[32];
} Pci;

typedef struct { Handle device; unsigned long long type, data; unsigned gi, ci; } Event;

static atomic_int init_count;
static atomic_int last_event; /* the number of the last Xid that was delivered, or that is older than the event set */

/* What every call begins with */

static int matches(const Rule *rule, const char *function) {
    const size_t length = strlen(rule->function);
    /* A card may be lost with its handle still being given out, so its bare `*` leaves that alone. */
    if (strcmp(rule->function, ANY) == 0) return rule->device == LIBRARY || strstr(function, "GetHandleBy") == NULL;
    if (length && rule->function[length - 1] == '*') return strncmp(rule->function, function, length - 1) == 0;
    return strcmp(rule->function, function) == 0;
}

static void sleep_for(double seconds) {
    struct timespec left = {.tv_sec = (time_t)seconds};
    left.tv_nsec = (long)((seconds - (double)left.tv_sec) * 1e9);
    while (nanosleep(&left, &left) != 0) continue;
}

static Code obey_rules(int device, const char *function) {
    int code = SUCCESS;
    for (int i = 0; i < state.rules; i++) {
        const Rule *rule = &state.rule[i];
        if (rule->device != device || !matches(rule, function)) continue;
        if (rule->hang_s > 0) sleep_for(rule->hang_s);
        if (code == SUCCESS) code = rule->code;
    }
    return (Code)code;
}

static Code begin(const char *function) {
    read_state();
    const Code code = obey_rules(LIBRARY, function);
    if (atomic_load(&init_count) == 0) return UNINITIALIZED;
    return code;
}

static Handle handle_of(const Device *device) {
    uint64_t hash = 14695981039346656037ULL;
    for (const char *byte = device->uuid; *byte; byte++) hash = (hash ^ (unsigned char)*byte) * 1099511628211ULL;
    return (Handle)(uintptr_t)hash;
}

static Code obey_rules_of_card_and_part(int device, const char *function) {
    const Code code = obey_rules(device, function);
    const int parent = state.device[device].parent;
    return code == SUCCESS && parent >= 0 ? obey_rules(parent, ANY) : code;
}

static Code begin_on(const char *function, Handle handle, Device **device) {
    const Code code = begin(function);
    if (code != SUCCESS) return code;
    if (handle == NULL) return INVALID_ARGUMENT;
    for (int i = 0; i < state.devices; i++) {
        *device = &state.device[i];
        if (handle_of(*device) == handle) return obey_rules_of_card_and_part(i, function);
    }
    return GPU_IS_LOST;
}

static Code give_handle(const char *function, int device, Handle *handle) {
    if (handle == NULL) return INVALID_ARGUMENT;
    const Code code = obey_rules(device, function);
    if (code == SUCCESS) *handle = handle_of(&state.device[device]);
    return code;
}

static Code give_text(const char *text, char *out, unsigned size) {
    if (text[0] == '\0') return NOT_SUPPORTED;
    if (out == NULL) return INVALID_ARGUMENT;
    if (strlen(text) >= size) return INSUFFICIENT_SIZE;
    strcpy(out, text);
    return SUCCESS;
}

static Code give_figure(long long figure, unsigned *out) {
    if (figure < 0) return NOT_SUPPORTED;
    if (out == NULL) return INVALID_ARGUMENT;
    *out = (unsigned)figure;
    return SUCCESS;
}

#define BEGIN()                        \
    const Code code = begin(__func__); \
    if (code != SUCCESS) return code

#define BEGIN_ON(handle)                                   \
    Device *device;                                        \
    const Code code = begin_on(__func__, handle, &device); \
    if (code != SUCCESS) return code

#define FIGURE(function, figure)                  \
    Code function(Handle handle, unsigned *out) { \
        BEGIN_ON(handle);                         \
        return give_figure(figure, out);          \
    }

#define TEXT(function, text)                                 \
    Code function(Handle handle, char *out, unsigned size) { \
        BEGIN_ON(handle);                                    \
        return give_text(text, out, size);                   \
    }

/* The library itself */

Code nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    read_state();
    const Code code = obey_rules(LIBRARY, __func__);
    if (code != SUCCESS) return code;
    if (state.init != SUCCESS) return (Code)state.init;
    atomic_fetch_add(&init_count, 1);
    return SUCCESS;
}

Code nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

Code nvmlShutdown(void) {
    BEGIN();
    atomic_fetch_sub(&init_count, 1);
    return SUCCESS;
}

const char *nvmlErrorString(int code) {
    static _Thread_local char text[40];
    snprintf(text, sizeof text, "fake NVML error %d", code);
    return text;
}

Code nvmlSystemGetDriverVersion(char *version, unsigned size) {
    BEGIN();
    return give_text(state.driver, version, size);
}

Code nvmlSystemGetNVMLVersion(char *version, unsigned size) {
    BEGIN();
    return give_text(state.driver, version, size);
}

/* Finding devices */

Code nvmlDeviceGetCount_v2(unsigned *count) {
    BEGIN();
    return give_figure(state.cards, count);
}

Code nvmlDeviceGetHandleByIndex_v2(unsigned index, Handle *handle) {
    BEGIN();
    for (int i = 0; i < state.devices; i++)
        if (state.device[i].parent < 0 && state.device[i].index == index) return give_handle(__func__, i, handle);
    return INVALID_ARGUMENT;
}

Code nvmlDeviceGetHandleByUUID(const char *uuid, Handle *handle) {
    BEGIN();
    for (int i = 0; i < state.devices; i++)
        if (strcmp(state.device[i].uuid, uuid) == 0) return give_handle(__func__, i, handle);
    return NOT_FOUND;
}

/* The domain may have four digits or eight, and the letters any case. */
static int read_bus_id(const char *text, unsigned *domain, unsigned *bus, unsigned *device) {
    unsigned function;
    return sscanf(text, "%x:%x:%x.%x", domain, bus, device, &function) == 4;
}

Code nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, Handle *handle) {
    unsigned wanted[3], found[3];
    BEGIN();
    if (!read_bus_id(bus_id, &wanted[0], &wanted[1], &wanted[2])) return INVALID_ARGUMENT;
    for (int i = 0; i < state.devices; i++)
        if (read_bus_id(state.device[i].bus_id, &found[0], &found[1], &found[2]) &&
            memcmp(wanted, found, sizeof wanted) == 0)
            return give_handle(__func__, i, handle);
    return NOT_FOUND;
}

FIGURE(nvmlDeviceGetIndex, device->parent < 0 ? (long long)device->index : -1)

/* What a device is */

TEXT(nvmlDeviceGetUUID, device->uuid)
TEXT(nvmlDeviceGetName, device->name)

Code nvmlDeviceGetPciInfo_v3(Handle handle, Pci *pci) {
    BEGIN_ON(handle);
    *pci = (Pci){0};
    if (!read_bus_id(device->bus_id, &pci->domain, &pci->bus, &pci->device)) return NOT_SUPPORTED;
    snprintf(pci->bus_id_legacy, sizeof pci->bus_id_legacy, "%04X:%02X:%02X.0", pci->domain & 0xFFFFu,
             pci->bus & 0xFFu, pci->device & 0xFFu);
    return give_text(device->bus_id, pci->bus_id, sizeof pci->bus_id);
}

/* What a device measures */

Code nvmlDeviceGetMemoryInfo(Handle handle, Memory *memory) {
    BEGIN_ON(handle);
    if (!device->has_memory) return NOT_SUPPORTED;
    const Bytes free = device->total - device->reserved - device->used;
#ifdef OLD_DRIVER
    /* Before 510 what the driver keeps for itself was in neither figure. */
    *memory = (Memory){.total = device->total - device->reserved, .free = free, .used = device->used};
#else
    *memory = (Memory){.total = device->total, .free = free, .used = device->used + device->reserved};
#endif
    return SUCCESS;
}

Code nvmlDeviceGetUtilizationRates(Handle handle, Utilization *rates) {
    BEGIN_ON(handle);
    *rates = (Utilization){0};
    return device->mig_mode == 1 ? NOT_SUPPORTED : give_figure(device->utilization, &rates->gpu);
}

FIGURE(nvmlDeviceGetPowerUsage, device->power)
FIGURE(nvmlDeviceGetEnforcedPowerLimit, device->power_limit)
FIGURE(nvmlDeviceGetPowerManagementLimit, device->power_limit)

Code nvmlDeviceGetTotalEnergyConsumption(Handle handle, unsigned long long *millijoules) {
    BEGIN_ON(handle);
    if (device->energy < 0) return NOT_SUPPORTED;
    *millijoules = (unsigned long long)device->energy;
    return SUCCESS;
}

Code nvmlDeviceGetTemperature(Handle handle, unsigned sensor, unsigned *celsius) {
    BEGIN_ON(handle);
    return sensor == 0 ? give_figure(device->temperature, celsius) : INVALID_ARGUMENT;
}

/* How healthy it is */

FIGURE(nvmlDeviceGetCurrPcieLinkWidth, device->link)
FIGURE(nvmlDeviceGetMaxPcieLinkWidth, device->link_max)

static Code give_long_figure(long long figure, unsigned long long *out) {
    if (figure >= 0) *out = (unsigned long long)figure;
    return figure < 0 ? NOT_SUPPORTED : SUCCESS;
}

Code nvmlDeviceGetTotalEccErrors(Handle handle, int type, int counter, unsigned long long *count) {
    BEGIN_ON(handle);
    /* Only the uncorrected errors since the driver was loaded are in the state. */
    return type == 1 && counter == 0 ? give_long_figure(device->ecc, count) : NOT_SUPPORTED;
}

Code nvmlDeviceGetRemappedRows(Handle handle, unsigned *correctable, unsigned *uncorrectable, unsigned *pending,
                               unsigned *failed) {
    BEGIN_ON(handle);
    *correctable = *uncorrectable = 0;
    const Code given = give_figure(device->remap_pending, pending);
    return given != SUCCESS ? given : give_figure(device->remap_failed, failed);
}

Code nvmlDeviceGetCurrentClocksThrottleReasons(Handle handle, unsigned long long *reasons) {
    BEGIN_ON(handle);
    return give_long_figure(device->throttle, reasons);
}

#ifndef OLD_DRIVER
Code nvmlDeviceGetCurrentClocksEventReasons(Handle handle, unsigned long long *reasons) {
    BEGIN_ON(handle);
    return give_long_figure(device->throttle, reasons);
}
#endif

/* Events: Xids with a number above that of the last one; there is one event set per process */

Code nvmlDeviceGetSupportedEventTypes(Handle handle, unsigned long long *types) {
    BEGIN_ON(handle);
    return give_long_figure(2 | 8, types);
}

Code nvmlEventSetCreate(Handle *set) {
    BEGIN();
    int newest = 0;
    for (int i = 0; i < state.xids; i++)
        if (state.xid[i].number > newest) newest = state.xid[i].number;
    if (newest > atomic_load(&last_event)) atomic_store(&last_event, newest);
    *set = &last_event;
    return SUCCESS;
}

Code nvmlDeviceRegisterEvents(Handle handle, unsigned long long types, Handle set) {
    BEGIN_ON(handle);
    return set == &last_event && (types & ~10ULL) == 0 ? SUCCESS : INVALID_ARGUMENT;
}

Code nvmlEventSetWait_v2(Handle set, Event *event, unsigned milliseconds) {
    BEGIN();
    (void)milliseconds;
    if (set != &last_event) return INVALID_ARGUMENT;
    const Xid *next = NULL;
    for (int i = 0; i < state.xids; i++)
        if (state.xid[i].number > atomic_load(&last_event) && (next == NULL || state.xid[i].number < next->number))
            next = &state.xid[i];
    if (next == NULL) return TIMED_OUT;
    atomic_store(&last_event, next->number);
    *event = (Event){.device = handle_of(&state.device[next->device]), .type = 8, .data = next->code};
    return SUCCESS;
}

Code nvmlEventSetFree(Handle set) {
    BEGIN();
    return set == &last_event ? SUCCESS : INVALID_ARGUMENT;
}

/* Who uses a device: of a split card, those of all its instances too */

static int is_listed(const Process *process, const char *kind, int device) {
    const int owner = process->device;
    return strcmp(process->kind, kind) == 0 && (owner == device || state.device[owner].parent == device);
}

static unsigned count_processes(const char *kind, int device) {
    unsigned count = 0;
    for (int i = 0; i < state.processes; i++) count += (unsigned)is_listed(&state.process[i], kind, device);
    return count;
}

static void write_process(void *out, size_t size, unsigned place, const Process *process) {
    const Device *owner = &state.device[process->device];
    const ProcessV2 full = {.pid = process->pid, .used = process->used, .gi = owner->gi, .ci = owner->ci};
    memcpy((char *)out + place * size, &full, size); /* the first version is the beginning of the second */
}

static Code list_processes(const char *kind, const Device *device, unsigned *count, void *out, size_t size) {
    if (count == NULL) return INVALID_ARGUMENT;
    const int place = (int)(device - state.device);
    const unsigned room = *count;
    *count = count_processes(kind, place);
    if (*count > room) return INSUFFICIENT_SIZE;
    if (*count > 0 && out == NULL) return INVALID_ARGUMENT;
    unsigned written = 0;
    for (int i = 0; i < state.processes; i++)
        if (is_listed(&state.process[i], kind, place)) write_process(out, size, written++, &state.process[i]);
    return SUCCESS;
}

#define PROCESS_LIST(function, kind, type)                            \
    Code function(Handle handle, unsigned *count, type *out) {        \
        BEGIN_ON(handle);                                             \
        return list_processes(kind, device, count, out, sizeof *out); \
    }

PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses, "compute", ProcessV1)
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v2, "compute", ProcessV2)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses, "graphics", ProcessV1)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, "graphics", ProcessV2)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses, "mps", ProcessV1)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, "mps", ProcessV2)

/* How busy each keeps it: those samples that are newer than `since` */

static unsigned write_samples(const Device *device, unsigned long long since, Sample *out) {
    unsigned count = 0;
    for (int i = 0; i < state.works; i++) {
        const Work *work = &state.work[i];
        if (work->device != device - state.device || work->at <= since) continue;
        if (out != NULL) out[count] = (Sample){.pid = work->pid, .at = work->at, .sm = work->percent};
        count++;
    }
    return count;
}

Code nvmlDeviceGetProcessUtilization(Handle handle, Sample *out, unsigned *count, unsigned long long since) {
    BEGIN_ON(handle);
    const unsigned room = *count;
    int is_sampled = 0;
    for (int i = 0; i < state.works; i++) is_sampled |= state.work[i].device == device - state.device;
    if (!is_sampled) return NOT_SUPPORTED;
    *count = write_samples(device, since, NULL);
    if (*count == 0) return NOT_FOUND;
    if (*count > room) return INSUFFICIENT_SIZE;
    write_samples(device, since, out);
    return SUCCESS;
}

#ifndef OLD_DRIVER
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v3, "compute", ProcessV2)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, "graphics", ProcessV2)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, "mps", ProcessV2)

Code nvmlDeviceGetMemoryInfo_v2(Handle handle, MemoryV2 *memory) {
    BEGIN_ON(handle);
    if (memory->version != MEMORY_V2) return VERSION_MISMATCH;
    if (!device->has_memory) return NOT_SUPPORTED;
    memory->total = device->total;
    memory->reserved = device->reserved;
    memory->used = device->used;
    memory->free = device->total - device->reserved - device->used;
    return SUCCESS;
}

Code nvmlDeviceGetTemperatureV(Handle handle, Temperature *temperature) {
    BEGIN_ON(handle);
    if (temperature->version != TEMPERATURE_V1) return VERSION_MISMATCH;
    if (temperature->sensor != 0) return INVALID_ARGUMENT;
    if (device->temperature < 0) return NOT_SUPPORTED;
    temperature->celsius = (int)device->temperature;
    return SUCCESS;
}
#endif

/* Cards split into MIG instances */

Code nvmlDeviceGetMigMode(Handle handle, unsigned *current, unsigned *pending) {
    BEGIN_ON(handle);
    const Code given = give_figure(device->mig_mode, current);
    return given != SUCCESS ? given : give_figure(device->mig_pending, pending);
}

FIGURE(nvmlDeviceGetMaxMigDeviceCount, device->mig_mode == 1 ? device->places : 0)

Code nvmlDeviceGetMigDeviceHandleByIndex(Handle handle, unsigned index, Handle *instance) {
    BEGIN_ON(handle);
    if (device->mig_mode != 1 || index >= device->places) return INVALID_ARGUMENT;
    for (int i = 0; i < state.devices; i++)
        if (state.device[i].parent == device - state.device && state.device[i].index == index)
            return give_handle(__func__, i, instance);
    return NOT_FOUND;
}

FIGURE(nvmlDeviceGetGpuInstanceId, device->parent < 0 ? -1 : (long long)device->gi)
FIGURE(nvmlDeviceGetComputeInstanceId, device->parent < 0 ? -1 : (long long)device->ci)

Code nvmlDeviceGetDeviceHandleFromMigDeviceHandle(Handle handle, Handle *card) {
    BEGIN_ON(handle);
    if (device->parent < 0) return INVALID_ARGUMENT;
    *card = handle_of(&state.device[device->parent]);
    return SUCCESS;
}

FIGURE(nvmlDeviceIsMigDeviceHandle, device->parent >= 0)

#include "nvml_links.h"
