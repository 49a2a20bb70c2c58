"""Manifest files, and jobs as processes of this machine."""
