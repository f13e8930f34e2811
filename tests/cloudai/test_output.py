"""What the programs of CloudAI's tests print becomes metrics."""

import pytest

from loopwright.cloudai.output import read_fio, read_nccl, read_osu, read_ucc

NCCL = """
# nThread 1 nGpus 1 minBytes 128 maxBytes 256 step: 2(factor) warmup iters: 5 iters: 20
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
         128            32     float     sum      -1    10.00    0.01    0.01      0    20.00    0.01    0.01      0
         256            64     float     sum      -1    30.00    0.01    0.01      0    40.00    0.01    0.01    N/A
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 12.5
"""
UCC = """
       Count        Size                Time, us                           Bandwidth, GB/s
                                 avg         min         max         avg         max         min
           1           4       11.00       10.00       12.50        0.10        0.20        0.05
           2           8       21.00       20.00       22.50        0.10        0.20        0.05
"""
FIO = """smoke: (g=0): rw=randrw, bs=(R) 4096B-4096B, ioengine=psync, iodepth=1
smoke: (groupid=0, jobs=1): err= 0: pid=1
  read: IOPS=12.5k, BW=48.8MiB/s (51.2MB/s)(4096KiB/84msec)
    clat (usec): min=1, max=900, avg=70.00, stdev=1
     lat (usec): min=1, max=901, avg=71.00, stdev=1
  write: IOPS=100, BW=512KiB/s (524kB/s)(4096KiB/84msec); 0 zone resets
    clat (msec): min=1, max=900, avg= 2.00, stdev=1
"""


def test_nccl_gives_mean_times_and_the_bus_bandwidth():
    expected = {"default": 30, "latency_in_place": 30, "latency_out_of_place": 20, "avg_busbw_gb_s": 12.5}
    assert read_nccl(NCCL) == pytest.approx(expected)


def test_ucc_gives_the_first_message_size():
    assert read_ucc(UCC) == pytest.approx({"default": 11, "time_avg": 11, "time_max": 12.5, "bandwidth_avg_gb_s": 0.1})


@pytest.mark.parametrize(
    ("output", "metrics"),
    [
        ("# OSU MPI\n# Size  Avg Latency(us)\n1  2.5\n8  3.5\n", {"default": 3.5, "latency_us": 3.5}),
        ("# Size  Bandwidth (MB/s)\n1  2.5\n", {"default": 2.5, "bandwidth_mb_s": 2.5}),
        ("# Size  MB/s  Messages/s\n1 2.5 7\n", {"default": 2.5, "bandwidth_mb_s": 2.5, "messages_s": 7}),
        ("Hello", {}),
    ],
)
def test_osu_gives_the_largest_message_size(output, metrics):
    assert read_osu(output) == metrics


def test_fio_gives_each_operation_and_the_configured_default():
    metrics = read_fio(FIO)
    assert metrics["default"] == pytest.approx(48.8 + 0.5)
    assert (metrics["read_iops"], metrics["write_iops"]) == (12500, 100)
    assert (metrics["read_latency"], metrics["write_latency"]) == (71, 2000)
    assert read_fio(FIO, ("read", "latency", "mean"))["default"] == 71
    assert "default" not in read_fio(FIO, ("trim", "bw", "sum"))


@pytest.mark.parametrize("read", [read_nccl, read_ucc, read_osu, read_fio])
def test_other_output_has_no_metrics(read):
    assert read("") == read("nothing 1 2 3\n\x00") == {}
