"""Parts of the documentation that follow from the code: `python -m docs.generate` writes them.

Each module names its `DOCUMENT` (a path below the repository) and its `PARTS`: name of a part -> its Markdown.
"""
