// Sets the chosen theme before the first paint; a module would run too late and flash the other one.
try {
  const theme = localStorage.getItem('kipp.theme');
  if (theme === 'light' || theme === 'dark') document.documentElement.dataset.theme = theme;
} catch {
  // Storage may be forbidden; the system's theme stands.
}
