"""Prints the rows of `mlxtape bench ops --json FILE` as one table: ours, the best peer, the ratio.

    python3 bench/peers/table.py FILE [EXPRESSION]   rows whose "op form pass shape dtype" match
"""

import json
import re
import sys


def cells(row):
    name = [row["op"], row.get("form", ""), row["pass"]]
    peers = sorted((us, peer) for peer, us in row["peers"].items())
    best = f"{peers[0][1]} {peers[0][0]:.1f}" if peers else "none"
    ratio = f"{peers[0][0] / row['us']:.2f}" if peers else ""
    return [
        " ".join(part for part in name if part),
        row["shape"],
        row["dtype"],
        f"{row['us']:.1f}",
        f"{row['gbps']:.0f}",
        f"{row['percent']:.0f} %",
        f"{row['host_us']:.1f}",
        f"{row['peak_bytes'] / 2**20:.1f}",
        best,
        ratio,
    ]


def main():
    with open(sys.argv[1]) as file:
        report = json.load(file)
    wanted = re.compile(sys.argv[2] if len(sys.argv) > 2 else "")
    head = ["op", "shape", "type", "us", "GB/s", "of the floor", "host us", "peak MiB"]
    rows = [head + ["best peer, us", "peer / ours"]]
    rows += [r for r in map(cells, report["rows"]) if wanted.search(" ".join(r[:3]))]
    widths = [max(len(r[c]) for r in rows) for c in range(len(rows[0]))]
    print(f"{report['device']}, {report['date']}, commit {report['commit']}, copy {report['copy_gbps']:.0f} GB/s,")
    print(f"graph node {report['graph_node_us']:.2f} us, {report.get('details', {})}\n")
    for i, row in enumerate(rows):
        print("| " + " | ".join(cell.ljust(w) for cell, w in zip(row, widths)) + " |")
        if i == 0:
            print("|" + "|".join("-" * (w + 2) for w in widths) + "|")


if __name__ == "__main__":
    main()
