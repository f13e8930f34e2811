"""What a campaign must survive: sudden death, hostile commands, full disks, damaged files, signals, bad input."""
