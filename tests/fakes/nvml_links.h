/* How the cards of the fake NVML are linked: NVLinks in the order of their lines, and what two cards share on PCIe. */

typedef enum { LINK_TO_CARD = 0, LINK_TO_SWITCH = 2 } LinkEnd;

static const NvLink *find_link(const Device *device, unsigned number) {
    const int place = (int)(device - state.device);
    for (int i = 0; i < state.links; i++)
        if (state.link[i].device == place && number-- == 0) return &state.link[i];
    return NULL;
}

static const Device *find_card(Handle handle) {
    for (int i = 0; i < state.devices; i++)
        if (handle_of(&state.device[i]) == handle) return &state.device[i];
    return NULL;
}

Code nvmlDeviceGetNvLinkState(Handle handle, unsigned number, unsigned *is_active) {
    BEGIN_ON(handle);
    const NvLink *link = find_link(device, number);
    if (link == NULL) return state.links ? INVALID_ARGUMENT : NOT_SUPPORTED;
    *is_active = strcmp(link->end, "off") != 0;
    return SUCCESS;
}

Code nvmlDeviceGetNvLinkRemoteDeviceType(Handle handle, unsigned number, LinkEnd *end) {
    BEGIN_ON(handle);
    const NvLink *link = find_link(device, number);
    if (link == NULL) return INVALID_ARGUMENT;
    *end = strcmp(link->end, "switch") == 0 ? LINK_TO_SWITCH : LINK_TO_CARD;
    return SUCCESS;
}

Code nvmlDeviceGetNvLinkRemotePciInfo_v2(Handle handle, unsigned number, Pci *pci) {
    BEGIN_ON(handle);
    const NvLink *link = find_link(device, number);
    if (link == NULL) return INVALID_ARGUMENT;
    *pci = (Pci){0};
    return give_text(link->end, pci->bus_id, sizeof pci->bus_id);
}

Code nvmlDeviceGetTopologyCommonAncestor(Handle handle, Handle other, int *level) {
    BEGIN_ON(handle);
    const Device *card = find_card(other);
    for (int i = 0; card != NULL && i < state.levels; i++) {
        const Level *known = &state.level[i];
        const char *ends[] = {state.device[known->device].bus_id, known->bus_id};
        for (int way = 0; way < 2; way++)
            if (strcmp(ends[way], device->bus_id) == 0 && strcmp(ends[1 - way], card->bus_id) == 0) {
                *level = known->level;
                return SUCCESS;
            }
    }
    return NOT_SUPPORTED;
}

Code nvmlDeviceGetP2PStatus(Handle handle, Handle other, int what, int *status) {
    BEGIN_ON(handle);
    (void)what;
    const Device *card = find_card(other);
    if (card == NULL) return GPU_IS_LOST;
    *status = device->is_apart || card->is_apart;
    return SUCCESS;
}
