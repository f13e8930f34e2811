"""How a command inside a room ended, told outside as if it had run there."""

# A shell, because it starts in a millisecond. It leaves SIGTERM to the command inside, which gets it too, and ends by
# the signal that the command ended by. File 3 is what its name says, file 4 takes a report; bubblewrap uses them.
# Before anything else it joins the control group, if there is one, so that all others are born into it.
TRUE_STATUS = """
trap '' TERM
[ -z "$LOOPWRIGHT_GROUP" ] || echo $$ > "$LOOPWRIGHT_GROUP" || exit 1
unset LOOPWRIGHT_GROUP
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
