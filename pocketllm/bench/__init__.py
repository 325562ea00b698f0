"""Measurements: one engine offline, a server under load, several engines side by side. Nothing here is imported by what is measured."""
