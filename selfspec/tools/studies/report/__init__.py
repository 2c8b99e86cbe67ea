"""The report of a study: data files, pictures for print, and one HTML page."""
