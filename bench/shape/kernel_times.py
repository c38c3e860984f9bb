#!/usr/bin/env python3
"""Sum up what kernel_times.c wrote: python3 kernel_times.py FILE MILLISECONDS [BEFORE_THE_END]."""
import collections
import sys


def main(file, length, before_end="0"):
    records = []
    for text in open(file, errors="replace"):
        parts = text.rstrip("\n").split(" ", 3)
        if len(parts) == 4:
            records.append((parts[0], int(parts[1]), int(parts[2]), parts[3]))
    end = max(start + time for kind, start, time, _ in records if kind != "A") - float(before_end) * 1e6
    begin = end - float(length) * 1e6
    for kinds, what in (("KMS", "on the GPU"), ("A", "driver calls")):
        counts, times = collections.Counter(), collections.Counter()
        for kind, start, time, name in records:
            if kind in kinds and begin <= start < end:
                counts[name[:110]] += 1
                times[name[:110]] += time
        print(f"{what}: {sum(times.values()) / 1e6:.1f} of {length} ms, {sum(counts.values())} records")
        for name, time in times.most_common(28):
            print(f"  {time / 1e6:9.3f} ms {counts[name]:6d} {time / counts[name] / 1e3:8.2f} us  {name}")


if __name__ == "__main__":
    main(*sys.argv[1:])
