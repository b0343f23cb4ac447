"""What Linux offers to lock a process in. Nothing here knows of processors, tensors or the server.

The standard library and ctypes alone: it runs in the zygote, and is there in every sandbox.
"""
