"""The processes of one router: workers, their supervisor, a successor."""
