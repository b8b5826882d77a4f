"""Horizontal fusion of a user's own code: find, check, rewrite, report (public: onepass.fuse)."""
