"""The names that are completed are those of what they name."""

import sm_90
import submission
from bench import names
from bench.checks.checks import CHECKS
from bench.contest.peers import PEERS
from task import BENCHMARKS


def test_tables():
    sm_90.install()
    assert set(names.TABLES) == set(submission.TABLES)


def test_shapes():
    assert tuple(f"{case['batchsize']}x{case['kvseqlen']}" for case in BENCHMARKS) == names.SHAPES


def test_checks():
    assert tuple(CHECKS) == names.CHECKS


def test_peers():
    assert tuple(peer.key for peer in PEERS) == names.PEERS
