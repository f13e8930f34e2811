"""How a command inside a room ended, told outside as if it had run there."""

# A shell, because it starts in a millisecond. It leaves SIGTERM to the command inside, which gets it too, and ends by
# the signal that the command ended by. File 3 is what its name says, file 4 takes a report; bubblewrap uses them.
TRUE_STATUS = """
trap '' TERM
exec 5>&2 2>/dev/null
"$@" 2>&5 3<"$0" 4>"$0.status" 5>&-
code=$?
if [ $code -gt 128 ] && [ $code -le 192 ]; then
    ulimit -c 0
    trap - TERM
    kill -$((code - 128)) $$
fi
exit $code
"""
