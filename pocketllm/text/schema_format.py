"""The string formats of JSON Schema that answers can be held to, each as a Rust regex of the whole string.

They are stricter than the standards where readers differ: no leap seconds, no year 0, upper-case T and Z, no IP addresses in
e-mail addresses. What is generated then passes every validator.
"""

from __future__ import annotations

_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_MONTH_DAY = "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
_DATE = f"(?:{_YEAR}-{_MONTH_DAY}|{_LEAP}-02-29)"
_HOUR_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_MINUTE}:[0-5][0-9](?:\.[0-9]{{1,6}})?(?:Z|[+-]{_HOUR_MINUTE})"

_NUMBER = "[0-9]{1,6}"
_DAYS = f"(?:{_NUMBER}Y(?:{_NUMBER}M(?:{_NUMBER}D)?)?|{_NUMBER}M(?:{_NUMBER}D)?|{_NUMBER}D)"
_HOURS = f"T(?:{_NUMBER}H(?:{_NUMBER}M(?:{_NUMBER}S)?)?|{_NUMBER}M(?:{_NUMBER}S)?|{_NUMBER}S)"

_ATOM = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]{1,12}"
_LABEL = "[A-Za-z](?:[A-Za-z0-9-]{0,30}[A-Za-z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,4}}"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_H16 = "[0-9a-fA-F]{1,4}"
_IPV6 = "|".join(
    [f"(?:{_H16}:){{7}}{_H16}", f"(?:{_H16}:){{1,7}}:"]
    + [f"(?:{_H16}:){{1,{before}}}(?::{_H16}){{1,{7 - before}}}" for before in range(1, 7)]
    + [f":(?:(?::{_H16}){{1,7}}|:)"]
)
_BASE64 = "(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?"
_URI_CHARACTER = "(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-F]{2})"

FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P(?:{_DAYS}(?:{_HOURS})?|{_HOURS}|{_NUMBER}W)",
    "email": rf"{_ATOM}(?:\.{_ATOM}){{0,3}}@{_LABEL}(?:\.{_LABEL}){{1,3}}",
    "hostname": _HOST,
    "ipv4": rf"(?:{_BYTE}\.){{3}}{_BYTE}",
    "ipv6": _IPV6,
    "uuid": "[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",
    "base64": _BASE64,
    "byte": _BASE64,
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]{{0,15}}://{_HOST}(?::[1-9][0-9]{{0,3}})?(?:/{_URI_CHARACTER}*)*(?:\?(?:{_URI_CHARACTER}|[/?])*)?(?:#(?:{_URI_CHARACTER}|[/?])*)?",
}

# OpenAPI's formats of numbers, which are plain bounds or say nothing of the value.
NUMBER_FORMATS: dict[str, tuple[int, int] | None] = {
    "int32": (-(2**31), 2**31 - 1),
    "int64": (-(2**63), 2**63 - 1),
    "float": None,
    "double": None,
}

# Formats of pydantic and OpenAPI that no text breaks: they say how a value is shown or stored, or what a file system has to have.
FREE_FORMATS = frozenset(("password", "binary", "path", "file-path", "directory-path"))
# Those that a validator may check; a library's own name for a pattern is none of them.
STANDARD_FORMATS = frozenset(
    (
        *FORMATS,
        *NUMBER_FORMATS,
        *("idn-email", "idn-hostname", "iri", "iri-reference", "uri-reference", "uri-template", "json-pointer", "relative-json-pointer", "regex"),
    )
)
