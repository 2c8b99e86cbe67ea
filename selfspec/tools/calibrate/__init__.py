"""Calibration: which draft is the fastest on this machine, measured once, kept in a profile, used by `draft="auto"`."""

from selfspec.control.profile import Chosen, Profile
from selfspec.control.setting import Setting
from selfspec.tools.calibrate.run import Calibration, calibrate
from selfspec.tools.calibrate.settings import Settings

__all__ = ["Calibration", "Chosen", "Profile", "Setting", "Settings", "calibrate"]
