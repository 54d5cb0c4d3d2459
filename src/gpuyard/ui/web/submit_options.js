/** Options of the submit form. Generated: run scripts/submit-options --write. */

export const SUBMIT_OPTIONS = {
  "gpus": {"label": "GPUs", "placeholder": "1", "help": "Number of GPUs; 0 for none.", "kind": "whole"},
  "vram": {"label": "Memory on each GPU", "placeholder": "learned from past runs", "help": "Reserve this much memory on each GPU, such as 8G.", "kind": "size"},
  "exclusive": {"label": "Use the GPU alone", "placeholder": null, "help": "Use the GPU alone.", "kind": "flag"},
  "ram": {"label": "RAM", "placeholder": "learned from past runs", "help": "Reserve this much RAM, such as 8G.", "kind": "size"},
  "linked": {"label": "Only GPUs joined by NVLink", "placeholder": null, "help": "Only GPUs that NVLink or XGMI joins; waits for such a set.", "kind": "flag"},
  "same-node": {"label": "Only GPUs of one NUMA node", "placeholder": null, "help": "Only GPUs of one NUMA node; waits for such a set.", "kind": "flag"},
  "priority": {"label": "Priority", "placeholder": "0", "help": "Higher starts earlier.", "kind": "whole"},
  "preempt": {"label": "Urgent: preempt other jobs", "placeholder": null, "help": "Preempt jobs of lower priority; the default priority is 100 then.", "kind": "flag"},
  "after": {"label": "After", "placeholder": "IDS", "help": "Start after all of these jobs have succeeded, such as 17 or 17-20.", "kind": "ids"},
  "retries": {"label": "Retries", "placeholder": "0", "help": "Retry this often after a failure; out of memory does not count.", "kind": "whole"},
  "time-limit": {"label": "Time limit", "placeholder": "TIME", "help": "Stop it after this long, such as 4h or 30m.", "kind": "time"},
  "name": {"label": "Name", "placeholder": "its command", "help": "Its name in the queue, in one word.", "kind": "word"},
  "tag": {"label": "Tag", "placeholder": "TEXT", "help": "Marks jobs that belong together: `gpuyard cancel tag=TEXT`.", "kind": "word"},
  "array": {"label": "Array", "placeholder": "RANGE", "help": "A job for each {index}: 0-99, 0-99:5 for every fifth, 0-99%8 for at most 8 at once.", "kind": "text"},
  "sweep": {"label": "Sweep", "placeholder": "NAME=VALUES", "help": "A job for each {NAME}: lr=1e-3,1e-4 or seed=0-4; repeat for all combinations.", "kind": "texts"},
  "env": {"label": "Environment variables", "placeholder": "NAME=VALUE", "help": "Set an environment variable.", "kind": "texts"},
  "image": {"label": "Container image", "placeholder": "IMAGE", "help": "Run it in a container of this image, with podman, docker or apptainer.", "kind": "text"},
  "mount": {"label": "Mounts of the container", "placeholder": "SRC[:DST][:ro]", "help": "With --image: mount this file or folder, such as /data:ro.", "kind": "texts"},
  "hold": {"label": "Hold it until it is released", "placeholder": null, "help": "Hold it until `gpuyard release`.", "kind": "flag"},
  "output": {"label": "Output file", "placeholder": "a log of the queue", "help": "Append its output to this file, such as logs/%x-%j.out or run-{lr}.txt.", "kind": "text"},
};
