#!/bin/bash
set -e
python3 - <<'END'
import csv, json
rows = [{**row, "age": int(row["age"]) if row["age"] else None} for row in csv.DictReader(open("people.csv"))]
json.dump(rows, open("people.json", "w"))
END
