"""Contract suites and fakes that authors of plug-ins subclass."""
