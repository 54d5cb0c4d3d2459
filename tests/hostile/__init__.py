"""The hostile-neighbour suite: one user of the machine attacks another.

Each attack is a test with the decorator `attack`, which records it in the catalogue. `python -m tests.hostile.catalogue
--write` writes the catalogue to docs/reference/attacks.md. Attacks marked `full` run in `make test-full` only.

- Anne (uid 61001) or root is the victim, Ben (uid 61002) attacks. Both are real users of the kernel, without an entry
  in the password file.
- Other users may not be able to read our Python environment. So their code runs in a forked process that has imported
  what it needs (`users.act_as`), and real `gpuyard` commands and daemons are root's.
"""
