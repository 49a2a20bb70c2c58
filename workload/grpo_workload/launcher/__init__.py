"""The first process of a trainer pod: starts and watches the ranks. May import `reporting`, `pod` and `spec`."""
