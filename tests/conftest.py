"""For all tests: none of them fails because the machine is busy, or because of how the run was started."""

import signal

from hypothesis import HealthCheck, settings

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# A background job starts with SIGINT and SIGQUIT ignored, and processes that tests start and signal would inherit
# that. SIGHUP is left alone, so that `nohup make test` outlives its terminal.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)
