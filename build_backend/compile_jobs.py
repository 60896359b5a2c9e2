"""How many compilers run at once: what the cores, the memory and the container's limit of memory allow."""

import os
from collections import namedtuple

# The most that a compiler takes for one file.
GIGABYTES_KERNEL = 0.4
GIGABYTES_TORCH = 1.0  # a file with torch's headers, or six of them as one

Jobs = namedtuple("Jobs", "all torch")

# cgroup v2 and v1: the hierarchy's folder, its controller in /proc/self/cgroup, the file that holds the limit
HIERARCHIES = (
    ("sys/fs/cgroup", "", "memory.max"),
    ("sys/fs/cgroup/memory", "memory", "memory.limit_in_bytes"),
)


def cgroup_limits(root="/"):
    """The limits of memory, in bytes, of this process's control groups and of all those around them."""
    try:
        with open(os.path.join(root, "proc/self/cgroup")) as file:
            lines = [line.strip().split(":", 2) for line in file]
    except OSError:
        return []
    groups = {name: path for _, controllers, path in lines for name in controllers.split(",")}
    limits = []
    for folder, controller, limit in HIERARCHIES:
        group = groups.get(controller, "").strip("/")
        while True:  # a container may see its own group as the root: groups that are not there are passed by
            try:
                with open(os.path.join(root, folder, group, limit)) as file:
                    limits.append(int(file.read()))
            except (OSError, ValueError):  # "max" is no limit
                pass
            if not group:
                break
            group = os.path.dirname(group)
    return limits


def memory(root="/"):
    """Gigabytes that this process may take."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([physical, *cgroup_limits(root)]) / 2**30


def jobs(cores, gigabytes):
    """As many files with torch's headers as there is room for, and kernels in what room that leaves."""
    torch = max(1, min(cores, int(gigabytes / GIGABYTES_TORCH)))
    kernels = max(0, int((gigabytes - torch * GIGABYTES_TORCH) / GIGABYTES_KERNEL))
    return Jobs(all=min(cores, torch + kernels), torch=torch)
