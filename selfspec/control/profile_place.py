"""Where profiles lie: a folder of the user's, one file for each setting."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from platformdirs import user_cache_path

from selfspec.control.profile import Profile, described, remedy
from selfspec.control.setting import Setting
from selfspec.errors import ProfileError

VARIABLE = "SELFSPEC_PROFILES"
"""The environment variable that names another folder."""


def folder() -> Path:
    """The folder of profiles: what `SELFSPEC_PROFILES` says, else one in the user's cache."""
    named = os.environ.get(VARIABLE)
    return Path(named) if named else user_cache_path("selfspec") / "profiles"


def default_file(setting: Setting) -> Path:
    """Where the profile of a setting lies. Versions are not in its name: a new one takes the place of an old one."""
    device = re.sub(r"[^A-Za-z0-9]+", "-", setting.device).strip("-")
    threads = f"_{setting.threads}-threads" if setting.threads else ""
    kernels = "_kernels" if setting.kernels else ""
    return folder() / f"{setting.fingerprint[:16]}_{device}_{setting.dtype}{threads}{kernels}.json"


def find_profile(setting: Setting) -> Profile | None:
    """The profile of a setting; None where these weights were never calibrated.

    Raises:
        ProfileError: they were in other settings alone; it says in which, and how to calibrate them in this one.
    """
    file = default_file(setting)
    if file.exists():
        profile = Profile.load(file)
        profile.check_setting(setting)
        return profile
    near = []
    for other in sorted(file.parent.glob(f"{setting.fingerprint[:16]}_*.json")):
        with suppress(ProfileError):
            near.append(f"{other} ({described(Profile.load(other).setting.differences(setting))})")
    if not near:
        return None
    raise ProfileError(
        f"draft='auto' needs a calibration profile for here, and {file.parent} has none of these weights that fits: "
        f"{'; '.join(near)}. Write one: {remedy(setting)}"
    )
