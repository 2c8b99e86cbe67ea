"""Reports of studies: data files, pictures for print, one self-contained page, and two studies side by side."""
