"""Calibration: which draft is the fastest on this machine, measured once, kept in a profile, used by `draft="auto"`."""

from selfspec.calibrate.profile import Chosen, Profile
from selfspec.calibrate.run import Calibration, calibrate
from selfspec.calibrate.setting import Setting
from selfspec.calibrate.settings import Settings

__all__ = ["Calibration", "Chosen", "Profile", "Setting", "Settings", "calibrate"]
