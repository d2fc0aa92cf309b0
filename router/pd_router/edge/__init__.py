"""Endpoints of the router."""
