/* page.h - page.html as it is sent at /: one static page, embedded by the Makefile (rule of page.o). */
#ifndef SERVER_PAGE_H
#define SERVER_PAGE_H

extern const char page_html[], page_html_end[];

#endif
