# inserts.sh JOURNAL SYNCHRONOUS PAGE_SIZE CACHE_KB BATCH ROWS: inserts rows, a transaction per batch, and counts them.
set -e
{
  echo "PRAGMA page_size = $3; PRAGMA journal_mode = $1; PRAGMA synchronous = $2; PRAGMA cache_size = -$4;"
  echo "CREATE TABLE events (id INTEGER PRIMARY KEY, name TEXT, value REAL); CREATE INDEX by_name ON events (name);"
  awk -v rows="$6" -v batch="$5" 'BEGIN {
    for (n = 0; n < rows; n++) {
      if (n % batch == 0) print "BEGIN;"
      printf "INSERT INTO events (name, value) VALUES (\"name-%d\", %d.5);\n", (n * 7919) % 1000, n
      if (n % batch == batch - 1 || n == rows - 1) print "COMMIT;"
    }
  }'
  echo "SELECT count(*) FROM events;"
} | sqlite3 events.db | tail -1 | grep -qx "$6"
