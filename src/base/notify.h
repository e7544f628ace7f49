/*
 * notify.h - tell the service manager how we are (sd_notify(3) of systemd: datagrams to $NOTIFY_SOCKET).
 *
 * Without that variable nothing is sent.  Failures are not told: the manager's own time limits act then.
 */
#ifndef BASE_NOTIFY_H
#define BASE_NOTIFY_H

/* "READY=1", "STOPPING=1", "WATCHDOG=1", "STATUS=..." or several, separated by newlines. */
void notify(const char *state);
/* Seconds between two WATCHDOG=1 that the manager asks for ($WATCHDOG_USEC, halved); 0: none. */
double notify_interval(void);

#endif
