"""Clients spread over several devices: the same results as on one."""

from pathlib import Path

BATTERY = Path(__file__).with_name("devices_battery.py")


def test_clients_spread_over_devices_give_the_same_results(run_on_devices):
    output = run_on_devices(BATTERY)
    for count in (2, 3, 8):
        assert f"all checks passed on {count} devices" in output
