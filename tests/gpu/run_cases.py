#!/usr/bin/env python3
"""Runs every case of GoogleTest programs in a process of its own, as many beside each other as there are cores.

usage: run_cases.py PROGRAM... [--filter FILTER] [--jobs N] [--case-seconds 240] [--seconds 3600] [--logs FOLDER]

A kernel that never ends takes its own case along and no other, and who began last does not wait for a shard that has long cases.
Kernels are kept in the user's cache (FOVEA_CACHE_DIR), so a second run compiles nothing. No case starts once --seconds are over.
Prints a line for each case that fails, what it said, and at the end how many passed, failed, took too long, were skipped or never
began. With --logs, what each case said is kept in FOLDER/PROGRAM/CASE.

Exit codes: 0 all that began passed and all began; 1 not so; 2 bad usage.
"""

import argparse
import collections
import concurrent.futures
import os
import pathlib
import subprocess
import sys
import time

VERDICTS = ("passed", "skipped", "failed", "took too long", "never began")


def cases_of(program, filter_):
    """Names as GoogleTest lists them: a suite, then its cases further right, comments behind '#'."""
    listed = subprocess.run([program, "--gtest_list_tests", f"--gtest_filter={filter_}"], capture_output=True, text=True, check=True)
    suite, cases = "", []
    for line in listed.stdout.splitlines():
        name = line.split("#")[0].strip()
        if line.startswith("  "):
            cases.append(suite + name)
        elif name.endswith("."):
            suite = name
    return cases


def run(program, case, seconds, end):
    """The verdict, and what the case said."""
    if time.monotonic() > end:
        return "never began", ""
    words = [program, "--gtest_brief=1", f"--gtest_filter={case}"]
    try:
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=seconds, check=False)
    except subprocess.TimeoutExpired as late:
        return "took too long", (late.stdout or b"").decode(errors="replace")
    if done.returncode != 0:
        return "failed", f"{done.stdout}exit status {done.returncode}\n"
    return ("skipped" if "[  SKIPPED ]" in done.stdout else "passed"), done.stdout


def keep(folder, program, case, said):
    file = folder / pathlib.Path(program).name / case.replace("/", "_")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(said)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("programs", nargs="+", metavar="PROGRAM")
    parser.add_argument("--filter", default="*", help="as GoogleTest's")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--case-seconds", type=float, default=240)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--logs", type=pathlib.Path)
    args = parser.parse_args()

    begin = time.monotonic()
    cases = [(program, case) for program in args.programs for case in cases_of(program, args.filter)]
    if not cases:
        print(f"run_cases: no case matches {args.filter}", file=sys.stderr)
        return 2
    counts = collections.Counter()
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        running = {pool.submit(run, *case, args.case_seconds, begin + args.seconds): case for case in cases}
        for num_done, future in enumerate(concurrent.futures.as_completed(running), 1):
            program, case = running[future]
            verdict, said = future.result()
            counts[verdict] += 1
            if args.logs:
                keep(args.logs, program, case, said)
            if verdict in ("failed", "took too long"):
                print(f"{case}: {verdict}\n{said}", flush=True)
            if num_done % 50 == 0:
                print(f"{num_done} of {len(cases)} cases, {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
    print(", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS), f"in {time.monotonic() - begin:.0f} s")
    return int(counts["passed"] + counts["skipped"] != len(cases))


if __name__ == "__main__":
    sys.exit(main())
