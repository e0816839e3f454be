"""The report of runs as one HTML file that needs neither network nor server.

Consumes the records of runs (`observe.run_data`). Produces the data of the page and the page itself; `slipstream watch`
serves the same. Waits only for the disk.
"""

from slipstream.observe.page.render import render, write_report

__all__ = ["render", "write_report"]
