"""Confinement of a process with Linux: seccomp, Landlock, namespaces, privileges and resource limits.

Independent of processors, tensors and the server. Needs only the standard library and ctypes, because it runs in the
zygote and is loaded in every sandbox.
"""
